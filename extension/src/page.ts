/** The report of a page that stands alone: its data lie in the page, there is no kernel to ask. */

import '../style/report.css';
import '../style/page.css';

import { ReportSource } from './live/source';
import { readReport } from './model/report';
import { mount } from './view/view';

function readData(): unknown {
  try {
    return JSON.parse(document.getElementById('aotlab-data')?.textContent ?? '');
  } catch {
    return null;
  }
}

const source = new ReportSource();
source.update({ reading: readReport(readData()) });
const host = document.getElementById('aotlab-page') ?? document.body;
host.classList.add('aotlab-whole');
mount(host, source);
