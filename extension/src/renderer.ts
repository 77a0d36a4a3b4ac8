/**
 * The renderer of a report in an output.
 *
 * At first it draws the report that the notebook contains. If the notebook's kernel answers for this report, the view
 * is *live*: it shows the kernel's report and can ask the kernel for more.
 */

import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import type { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import { Widget } from '@lumino/widgets';
import type { Message } from '@lumino/messaging';

import { Connection } from './live/connection';
import { ReportSource } from './live/source';
import { readPacked } from './model/packed';
import { MIME_TYPE } from './model/report';
import type { IDisposable } from './source';
import type { OpenTab } from './tab';
import { mount } from './view/view';

export class ReportRenderer extends Widget implements IRenderMime.IRenderer {
  private readonly resolver: IRenderMime.IResolver | null;
  private readonly tracker: INotebookTracker | null;
  private readonly source = new ReportSource();
  private readonly view: IDisposable;
  private connection: Connection | null = null;
  private drawnData: unknown = null;

  constructor(options: IRenderMime.IRendererOptions, tracker: INotebookTracker | null, open: OpenTab | null) {
    super();
    this.addClass('aotlab-output');
    this.resolver = options.resolver;
    this.tracker = tracker;
    const show = open === null ? null : (): void => open(this.source.reading, this.notebook());
    this.view = mount(this.node, this.source, show);
    tracker?.widgetAdded.connect(this.onNotebook, this);
  }

  override dispose(): void {
    if (!this.isDisposed) {
      this.tracker?.widgetAdded.disconnect(this.onNotebook, this);
      this.connection?.dispose();
      this.view.dispose();
    }
    super.dispose();
  }

  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    const data = model.data[MIME_TYPE];
    if (this.isDisposed || data === this.drawnData) {
      return;
    }
    this.drawnData = data;
    const reading = await readPacked(data);
    // Newer data may have come while these were decompressed.
    if (this.isDisposed || data !== this.drawnData) {
      return;
    }
    // While the view is live, keep the kernel's version of the report: it is at least as new, and not cut. The
    // present activity of a running cell comes with the output.
    if (this.source.live && reading.report?.identifier === this.source.identifier) {
      this.source.follow(reading.report.running);
    } else {
      this.source.update({ reading });
      this.connection?.retry();
      this.connect();
    }
  }

  protected override onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    this.connect();
  }

  private onNotebook(): void {
    this.connect();
  }

  /** Find the notebook that contains the output. */
  private notebook(): NotebookPanel | null {
    // The user may have moved the output to a separate tab. It keeps its notebook's resolver there.
    const containsOutput = (panel: NotebookPanel): boolean =>
      (this.resolver !== null && panel.context.urlResolver === this.resolver) || panel.node.contains(this.node);
    const panel = this.tracker?.find(containsOutput);
    return panel === undefined || panel.isDisposed ? null : panel;
  }

  /** Connect to the notebook's kernel. */
  private connect(): void {
    if (this.connection !== null || this.source.identifier === '' || this.isDisposed) {
      return;
    }
    const panel = this.notebook();
    if (panel !== null) {
      this.connection = new Connection(panel.sessionContext, this.source);
    }
  }
}

/**
 * Make the factory of renderers. `tracker` finds notebooks; it is null in an application without notebooks. `open`
 * shows a report in a tab; it is null in an application without tabs.
 */
export function rendererFactory(tracker: INotebookTracker | null, open: OpenTab | null): IRenderMime.IRendererFactory {
  return {
    // A report is safe whoever wrote it, because it is drawn as text and shapes only.
    safe: true,
    mimeTypes: [MIME_TYPE],
    createRenderer: options => new ReportRenderer(options, tracker, open)
  };
}
