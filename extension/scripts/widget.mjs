// Bundle the anywidget into the Python package, where it is data: a module and its style.
import { build } from 'esbuild';
import { fileURLToPath } from 'node:url';

const here = path => fileURLToPath(new URL(path, import.meta.url));

await build({
  absWorkingDir: here('..'),
  entryPoints: { dashboard: 'src/widget.ts' },
  outdir: here('../../aotlab/notebook/static'),
  bundle: true,
  format: 'esm',
  target: 'es2022',
  minify: true,
  legalComments: 'none',
  logLevel: 'warning'
});
