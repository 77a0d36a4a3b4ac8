// Bundle the layout worker into a text, from which the pages start it: a page that is one file cannot load a second.
import { build } from 'esbuild';
import { writeFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

import { licences } from './licences.mjs';

const here = path => fileURLToPath(new URL(path, import.meta.url));

function bundled(entry) {
  return build({
    absWorkingDir: here('..'),
    entryPoints: [entry],
    outdir: 'unused',
    bundle: true,
    format: 'iife',
    target: 'es2022',
    minify: true,
    metafile: true,
    legalComments: 'none',
    write: false
  });
}

/** Return the content of the module `src/pictures/workerText.ts` with the worker's code, which begins with `comment`. */
export async function workerModule(comment = '') {
  const { outputFiles } = await bundled('src/pictures/graphWorker.ts');
  return `export const WORKER_TEXT = ${JSON.stringify(comment + outputFiles[0].text)};\n`;
}

// As a script: replace the compiled module, which JupyterLab's builder packs. The builder drops comments of modules, so
// the licences of all packages are a comment in the text.
if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const { metafile } = await bundled('src/page.ts');
  writeFileSync(here('../lib/pictures/workerText.js'), await workerModule(licences(metafile, here('..'))));
}
