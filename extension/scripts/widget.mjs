// Bundle the anywidget and the script of a page that stands alone into the Python package, where it is data: modules and their styles.
import { build } from 'esbuild';
import { readFileSync, writeFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

import { licences } from './licences.mjs';
import { workerModule } from './worker.mjs';

const here = path => fileURLToPath(new URL(path, import.meta.url));

const { metafile } = await build({
  absWorkingDir: here('..'),
  entryPoints: { dashboard: 'src/widget.ts', page: 'src/page.ts' },
  outdir: here('../../aotlab/report/static'),
  bundle: true,
  format: 'esm',
  target: 'es2022',
  minify: true,
  metafile: true,
  legalComments: 'none',
  logLevel: 'warning',
  plugins: [
    {
      name: 'worker',
      setup: ({ onLoad }) => onLoad({ filter: /workerText\.ts$/ }, async () => ({ contents: await workerModule() }))
    }
  ]
});

// Each bundle begins with the licences of the packages in it, because a page that contains the bundle is one file.
for (const name of ['dashboard', 'page']) {
  const path = here(`../../aotlab/report/static/${name}.js`);
  writeFileSync(path, licences(metafile, here('..')) + readFileSync(path, 'utf-8'));
}
