// Bundle the anywidget and the script of a page that stands alone into the Python package, where it is data: modules and their styles.
import { build } from 'esbuild';
import { fileURLToPath } from 'node:url';

const here = path => fileURLToPath(new URL(path, import.meta.url));

await build({
  absWorkingDir: here('..'),
  entryPoints: { dashboard: 'src/widget.ts', page: 'src/page.ts' },
  outdir: here('../../aotlab/report/static'),
  bundle: true,
  format: 'esm',
  target: 'es2022',
  minify: true,
  legalComments: 'none',
  logLevel: 'warning'
});
