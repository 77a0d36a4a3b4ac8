// The licences of the packages in a bundle.
import { readFileSync } from 'node:fs';

/** Return the licences of all packages in esbuild's `metafile` as one comment. Equal texts appear once. */
export function licences(metafile, root) {
  const inputs = Object.keys(metafile.inputs).map(path => /^(.*node_modules\/(@[^/]+\/[^/]+|[^/]+))\//.exec(path));
  const folders = new Map(inputs.filter(found => found !== null).map(found => [found[2], found[1]]));
  const texts = new Map();
  for (const [name, folder] of [...folders].sort()) {
    const text = readFileSync(`${root}/${folder}/LICENSE`, 'utf-8').trim();
    texts.set(text, [...(texts.get(text) ?? []), name]);
  }
  const parts = [...texts].map(([text, names]) => `${names.join(', ')}\n\n${text}`);
  return parts.length === 0 ? '' : `/*! Third-party licences\n\n${parts.join('\n\n\n')}\n*/\n`;
}
