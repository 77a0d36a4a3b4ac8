/** The report in a standalone page: the page contains the data, and there is no kernel. */

import '../style/report.css';
import '../style/page.css';

import { ReportSource } from './live/source';
import { readPacked } from './model/packed';
import { mount } from './view/view';

function readData(): unknown {
  try {
    return JSON.parse(document.getElementById('aotlab-data')?.textContent ?? '');
  } catch {
    return null;
  }
}

const host = document.getElementById('aotlab-page') ?? document.body;
host.classList.add('aotlab-whole');
void readPacked(readData()).then(reading => {
  const source = new ReportSource();
  source.update({ reading });
  mount(host, source);
});
