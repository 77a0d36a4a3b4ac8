/** The reports in a standalone page: the page contains the data, and there is no kernel. */

import '../style/report.css';
import '../style/page.css';

import { ReportSource } from './live/source';
import { readPacked } from './model/packed';
import type { Reading } from './model/report';
import { h } from './view/dom';
import { mount } from './view/view';

function readData(host: Element): unknown {
  try {
    return JSON.parse(host.querySelector('script')?.textContent ?? '');
  } catch {
    return null;
  }
}

/** The title of a report in a page of several reports: the number and the first line of the cell, or the name. */
function titleOf({ report }: Reading): HTMLElement {
  const cell = report?.cell ?? null;
  const line = cell?.source.split('\n').find(each => !each.startsWith('%%') && each.trim() !== '') ?? '';
  const count = cell?.execution_count ?? null;
  return h('h2', {}, count === null ? (report?.name ?? '') : `In [${count}]`, h('code', {}, line));
}

const hosts = [...document.querySelectorAll('.aotlab-page')];
for (const host of hosts) {
  void readPacked(readData(host)).then(reading => {
    const place = h('div', { class: 'aotlab-whole' });
    host.append(...(hosts.length > 1 ? [titleOf(reading)] : []), place);
    const source = new ReportSource();
    source.update({ reading });
    mount(place, source);
  });
}
