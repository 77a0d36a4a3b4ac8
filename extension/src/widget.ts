/** The same view as an anywidget, drawn from the traits of `aotlab.notebook.dashboard.Dashboard`. */

import '../style/report.css';

import { readMessage, ReportSource } from './live/source';
import { readReport } from './model/report';
import { mount } from './view/view';

/** What we use of anywidget's model. */
interface Model {
  get(name: string): unknown;
  on(event: string, callback: (content: unknown) => void): void;
  off(event: string, callback: (content: unknown) => void): void;
  send(content: unknown): void;
}

function words(value: unknown): string {
  return typeof value === 'string' ? value : '';
}

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const source = new ReportSource();
  el.classList.add('aotlab-widget');
  const takeReport = (): void => {
    source.update({ reading: readReport(model.get('report')), failure: '' });
    takeRest();
  };
  const takeRest = (): void =>
    source.update({
      progress: words(model.get('progress')),
      // The trait also holds why a measurement failed: whether one runs is for the kernel to know.
      busy: false,
      live: model.get('live') === true
    });
  const takeMessage = (content: unknown): void => {
    const message = readMessage(content);
    if (message !== null && ['error', 'graph', 'nodes', 'outside', 'verification'].includes(message.kind)) {
      source.receive(message);
    }
  };
  const listeners: readonly (readonly [string, (content: unknown) => void])[] = [
    ['change:report', takeReport],
    ['change:progress', takeRest],
    ['change:live', takeRest],
    ['msg:custom', takeMessage]
  ];
  takeReport();
  source.onAsk = request => model.send(request);
  for (const [event, listener] of listeners) {
    model.on(event, listener);
  }
  const view = mount(el, source);
  return () => {
    for (const [event, listener] of listeners) {
      model.off(event, listener);
    }
    view.dispose();
  };
}

export default { render };
