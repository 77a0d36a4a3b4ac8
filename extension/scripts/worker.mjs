// Bundle the layout worker into a text, from which the pages start it: a page that is one file cannot load a second.
import { build } from 'esbuild';
import { writeFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

const here = path => fileURLToPath(new URL(path, import.meta.url));

/** Return the content of the module `src/pictures/workerText.ts` with the worker's code. */
export async function workerModule() {
  const { outputFiles } = await build({
    absWorkingDir: here('..'),
    entryPoints: ['src/pictures/graphWorker.ts'],
    bundle: true,
    format: 'iife',
    target: 'es2022',
    minify: true,
    legalComments: 'none',
    write: false
  });
  return `export const WORKER_TEXT = ${JSON.stringify(outputFiles[0].text)};\n`;
}

// As a script: replace the compiled module, which JupyterLab's builder packs.
if (process.argv[1] === fileURLToPath(import.meta.url)) {
  writeFileSync(here('../lib/pictures/workerText.js'), await workerModule());
}
