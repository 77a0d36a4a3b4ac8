/** The worker that computes layouts. The build bundles this file into a text; see `workerText.ts`. */

import { layOut } from './graphLayout';
import type { IBox } from './graphLayout';

self.onmessage = ({ data }: MessageEvent<{ id: number; boxes: IBox[] }>): void => {
  self.postMessage({ id: data.id, placed: data.boxes.map(layOut) });
};
