/** The view of a report as an anywidget. It draws the traits of `aotlab.notebook.dashboard.Dashboard`. */

import '../style/report.css';

import { readMessage, ReportSource } from './live/source';
import { readReport } from './model/report';
import { mount } from './view/view';

/** The methods of anywidget's model that we use. */
interface IModel {
  get(name: string): unknown;
  on(event: string, callback: (content: unknown) => void): void;
  off(event: string, callback: (content: unknown) => void): void;
  send(content: unknown): void;
}

function textOrEmpty(value: unknown): string {
  return typeof value === 'string' ? value : '';
}

function render({ model, el }: { model: IModel; el: HTMLElement }): () => void {
  const source = new ReportSource();
  el.classList.add('aotlab-widget');
  const takeReport = (): void => {
    source.update({ reading: readReport(model.get('report')), failure: '' });
    takeLiveState();
  };
  const takeLiveState = (): void =>
    source.update({
      progress: textOrEmpty(model.get('progress')),
      // The trait `progress` also has the reason why a measurement failed. So a text does not tell that one runs.
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
    ['change:progress', takeLiveState],
    ['change:live', takeLiveState],
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
