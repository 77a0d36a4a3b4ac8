// Bundle the tests, which are TypeScript, and run them with Node's own runner.
import { build } from 'esbuild';
import { spawnSync } from 'node:child_process';
import { readdirSync, rmSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

const here = fileURLToPath(new URL('.', import.meta.url));
const out = fileURLToPath(new URL('../lib/test', import.meta.url));
const tests = readdirSync(here).filter(name => name.endsWith('.test.ts'));

rmSync(out, { recursive: true, force: true });
await build({
  absWorkingDir: here,
  entryPoints: tests,
  outdir: out,
  outExtension: { '.js': '.mjs' },
  bundle: true,
  format: 'esm',
  platform: 'node',
  target: 'node20',
  external: ['jsdom'],
  sourcemap: 'inline',
  logLevel: 'warning'
});
const files = tests.map(name => `${out}/${name.replace(/\.ts$/, '.mjs')}`);
const done = spawnSync(process.execPath, ['--enable-source-maps', '--test', ...files], { stdio: 'inherit' });
process.exit(done.status ?? 1);
