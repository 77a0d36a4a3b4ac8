/** Compute layouts in a worker. Where a page forbids workers, they are computed in the page itself. */

import { layOut } from './graphLayout';
import type { IBox, IPlaced } from './graphLayout';
import { WORKER_TEXT } from './workerText';

interface IJob {
  readonly boxes: readonly IBox[];
  readonly done: (placed: readonly IPlaced[]) => void;
}

let worker: Worker | null = null;
let isForbidden = WORKER_TEXT === '' || typeof Worker === 'undefined';
let jobCount = 0;
const jobs = new Map<number, IJob>();

/** Place the boxes inside of each of `boxes`. */
export function placed(boxes: readonly IBox[]): Promise<readonly IPlaced[]> {
  return new Promise(done => {
    jobCount += 1;
    jobs.set(jobCount, { boxes, done });
    const running = started();
    if (running === null) {
      doAllHere();
    } else {
      running.postMessage({ id: jobCount, boxes });
    }
  });
}

/** The worker, which is started at the first job; null if the page forbids it. */
function started(): Worker | null {
  if (worker !== null || isForbidden) {
    return worker;
  }
  try {
    // A script of another place could not be loaded by a page that is a file, and by a widget.
    worker = new Worker(URL.createObjectURL(new Blob([WORKER_TEXT], { type: 'text/javascript' })));
  } catch {
    isForbidden = true;
    return null;
  }
  worker.onmessage = ({ data }: MessageEvent<{ id: number; placed: readonly IPlaced[] }>): void => {
    jobs.get(data.id)?.done(data.placed);
    jobs.delete(data.id);
  };
  // A Content-Security-Policy may forbid the worker only after it was made.
  worker.onerror = (): void => {
    isForbidden = true;
    worker = null;
    doAllHere();
  };
  return worker;
}

function doAllHere(): void {
  for (const [id, { boxes, done }] of [...jobs]) {
    jobs.delete(id);
    done(boxes.map(layOut));
  }
}
