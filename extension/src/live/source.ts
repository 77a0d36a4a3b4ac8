/** A report that changes: set from a notebook's output, from a kernel's messages, or from a widget's traits. */

import { readGraph, readNodes, readOutside, readReport, readVerification } from '../model/report';
import type { Graph, Node, Reading, Report } from '../model/report';
import type { Source } from '../source';

/** What a kernel says of a report. */
export type Message =
  | { readonly kind: 'report'; readonly report: unknown }
  | { readonly kind: 'graph'; readonly frame: string; readonly graph: unknown }
  | { readonly kind: 'nodes'; readonly frame: string; readonly index: number; readonly nodes: unknown }
  | { readonly kind: 'verification' | 'outside'; readonly rows: unknown }
  | { readonly kind: 'unknown' }
  | { readonly kind: 'progress'; readonly text: string }
  | { readonly kind: 'error'; readonly message: string };

/** Read a message; null if it is none of those that we know. */
export function readMessage(data: unknown): Message | null {
  if (typeof data !== 'object' || data === null) {
    return null;
  }
  const fields = data as Record<string, unknown>;
  const words = (value: unknown): string => (typeof value === 'string' ? value : '');
  switch (fields['kind']) {
    case 'report':
      return { kind: 'report', report: fields['report'] };
    case 'graph':
      return { kind: 'graph', frame: words(fields['frame']), graph: fields['graph'] };
    case 'nodes':
      return { kind: 'nodes', frame: words(fields['frame']), index: Number(fields['index']), nodes: fields['nodes'] };
    case 'verification':
    case 'outside':
      return { kind: fields['kind'], rows: fields['rows'] };
    case 'unknown':
      return { kind: 'unknown' };
    case 'progress':
      return { kind: 'progress', text: words(fields['text']) };
    case 'error':
      return { kind: 'error', message: words(fields['message']) || 'no reason given' };
    default:
      return null;
  }
}

/** What a view asks of the kernel. */
export type Request =
  | { readonly kind: 'measure' }
  | { readonly kind: 'graph' | 'nodes'; readonly frame: string; readonly index: number }
  | { readonly kind: 'verification' | 'outside' };

interface State {
  readonly reading: Reading;
  readonly progress: string;
  readonly busy: boolean;
  readonly failure: string;
  readonly live: boolean;
}

/** A source whose state is replaced as a whole, and which tells its listeners. */
export class ReportSource implements Source {
  /** Called with what is asked of the kernel. */
  onAsk: ((request: Request) => void) | null = null;

  private state: State = { reading: readReport(null), progress: '', busy: false, failure: '', live: false };
  private readonly listeners = new Set<() => void>();
  /** What was asked for since the last report came. */
  private readonly asked = new Set<string>();
  /** Nodes that came; those of a graph never change. */
  private readonly known = new Map<string, readonly Node[]>();

  get reading(): Reading {
    return this.state.reading;
  }

  get progress(): string {
    return this.state.progress;
  }

  get busy(): boolean {
    return this.state.busy;
  }

  get failure(): string {
    return this.state.failure;
  }

  get live(): boolean {
    return this.state.live;
  }

  /** The report's identifier; empty if it has none or cannot be read. */
  get identifier(): string {
    return this.state.reading.report?.identifier ?? '';
  }

  onChange(callback: () => void): () => void {
    this.listeners.add(callback);
    return () => {
      this.listeners.delete(callback);
    };
  }

  measure(): void {
    if (this.live && !this.busy) {
      // At once, so that a second click asks nothing twice.
      this.update({ progress: 'asking the kernel …', busy: true, failure: '' });
      this.onAsk?.({ kind: 'measure' });
    }
  }

  askGraph(frame: string, index: number): void {
    this.askOnce({ kind: 'graph', frame, index });
  }

  nodes(frame: string, index: number): readonly Node[] | null {
    const known = this.known.get(`${frame}/${index}`);
    if (known === undefined) {
      this.askOnce({ kind: 'nodes', frame, index });
    }
    return known ?? null;
  }

  askRows(kind: 'verification' | 'outside'): void {
    this.askOnce({ kind });
  }

  private askOnce(request: Request): void {
    const key = JSON.stringify(request);
    if (this.live && !this.asked.has(key)) {
      this.asked.add(key);
      this.onAsk?.(request);
    }
  }

  /** Put a part that came by itself into the report. */
  private complete(change: (report: Report) => Partial<Report>): void {
    const { reading } = this.state;
    if (reading.report !== null && this.live) {
      this.replace({ reading: { ...reading, report: { ...reading.report, ...change(reading.report) } } });
    }
  }

  /** Replace part of the state; of another report everything may be asked again. */
  update(changes: Partial<State>): void {
    if (changes.reading !== undefined) {
      this.asked.clear();
      if (changes.reading.report?.identifier !== this.identifier) {
        this.known.clear();
      }
    }
    this.replace(changes);
  }

  private replace(changes: Partial<State>): void {
    this.state = { ...this.state, ...changes };
    for (const listener of [...this.listeners]) {
      listener();
    }
  }

  /** Take in what a kernel says. */
  receive(message: Message): void {
    switch (message.kind) {
      case 'graph': {
        const graph = readGraph(message.graph);
        this.complete(report => ({
          frames: report.frames.map(frame => (frame.name === message.frame ? { ...frame, graphs: put(frame.graphs, graph) } : frame))
        }));
        break;
      }
      case 'nodes':
        this.known.set(`${message.frame}/${message.index}`, readNodes(message.nodes));
        this.complete(() => ({}));
        break;
      case 'verification':
        this.complete(() => ({ verification_rows: readVerification(message.rows) }));
        break;
      case 'outside':
        this.complete(({ cell }) => (cell === null ? {} : { cell: { ...cell, mutated_outside: readOutside(message.rows) } }));
        break;
      case 'report':
        this.update({
          reading: readReport(message.report),
          progress: '',
          busy: false,
          failure: '',
          live: true
        });
        break;
      case 'progress':
        this.update({ progress: message.text, busy: true });
        break;
      case 'error':
        this.update({ progress: '', busy: false, failure: message.message });
        break;
      case 'unknown':
        this.leave();
        break;
    }
  }

  /** Nobody answers any more: what is shown stays, as a still. */
  leave(): void {
    if (this.live || this.progress !== '' || this.failure !== '') {
      this.update({ live: false, progress: '', busy: false, failure: '' });
    }
  }
}

/** Put a graph in the place of that with its number, or where it belongs if it was cut. */
function put(graphs: readonly Graph[], graph: Graph): readonly Graph[] {
  return [...graphs.filter(each => each.index !== graph.index), graph].sort((a, b) => a.index - b.index);
}
