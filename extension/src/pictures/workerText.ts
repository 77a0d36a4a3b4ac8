/** The code of the layout worker. The build replaces this file (`scripts/worker.mjs`); without a build it is empty. */
export const WORKER_TEXT: string = '';
