/** The icon of aotlab: a graph whose two halves are joined, as the forward and the backward are. */

import { LabIcon } from '@jupyterlab/ui-components';

export const icon = new LabIcon({
  name: 'aotlab:icon',
  svgstr: `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">
  <g class="jp-icon3" fill="none" stroke="#616161" stroke-width="2">
    <path d="M5 8v8M7 18h10M19 16V8M7 6h10"/>
  </g>
  <g class="jp-icon3" fill="#616161">
    <circle cx="5" cy="6" r="3"/><circle cx="19" cy="6" r="3"/><circle cx="5" cy="18" r="3"/><circle cx="19" cy="18" r="3"/>
  </g>
</svg>`
});
