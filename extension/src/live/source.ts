/**
 * The report that a view draws, and its state.
 *
 * It is set from a notebook's output, from a kernel's messages, or from a widget's traits.
 */

import { readGraph, readNodes, readOutside, readReport, readVerification } from '../model/report';
import type { Graph, Node, Reading, Report, Running } from '../model/report';
import type { AskedChoice, ISource } from '../source';

/** A message from a kernel about a report. */
export type Message =
  | { readonly kind: 'report'; readonly report: unknown }
  | { readonly kind: 'graph'; readonly frame: string; readonly graph: unknown }
  | { readonly kind: 'nodes'; readonly frame: string; readonly index: number; readonly nodes: unknown }
  | { readonly kind: 'verification' | 'outside'; readonly rows: unknown }
  | { readonly kind: 'unknown' }
  | { readonly kind: 'progress'; readonly text: string }
  | { readonly kind: 'error'; readonly message: string };

/** Read a message; null if its kind is unknown. */
export function readMessage(data: unknown): Message | null {
  if (typeof data !== 'object' || data === null) {
    return null;
  }
  const fields = data as Record<string, unknown>;
  const textOrEmpty = (value: unknown): string => (typeof value === 'string' ? value : '');
  switch (fields['kind']) {
    case 'report':
      return { kind: 'report', report: fields['report'] };
    case 'graph':
      return { kind: 'graph', frame: textOrEmpty(fields['frame']), graph: fields['graph'] };
    case 'nodes':
      return {
        kind: 'nodes',
        frame: textOrEmpty(fields['frame']),
        index: Number(fields['index']),
        nodes: fields['nodes']
      };
    case 'verification':
    case 'outside':
      return { kind: fields['kind'], rows: fields['rows'] };
    case 'unknown':
      return { kind: 'unknown' };
    case 'progress':
      return { kind: 'progress', text: textOrEmpty(fields['text']) };
    case 'error':
      return { kind: 'error', message: textOrEmpty(fields['message']) || 'no reason given' };
    default:
      return null;
  }
}

/** A request from a view to the kernel. */
export type Request =
  | { readonly kind: 'measure' }
  | ({ readonly kind: 'apply' } & AskedChoice)
  | { readonly kind: 'graph' | 'nodes'; readonly frame: string; readonly index: number }
  | { readonly kind: 'verification' | 'outside' };

interface IState {
  readonly reading: Reading;
  readonly progress: string;
  readonly busy: boolean;
  readonly failure: string;
  readonly live: boolean;
}

/** A source of a view. Each change replaces its immutable state, and then calls the listeners. */
export class ReportSource implements ISource {
  /** The function that sends a request to the kernel; null if no kernel is connected. */
  onAsk: ((request: Request) => void) | null = null;

  private state: IState = { reading: readReport(null), progress: '', busy: false, failure: '', live: false };
  private readonly listeners = new Set<() => void>();
  /** The requests that were sent since the report was last replaced; they are not sent again. */
  private readonly sentRequests = new Set<string>();
  /** The nodes that the kernel has sent, by function and graph. The nodes of a graph never change. */
  private readonly nodesOfGraphs = new Map<string, readonly Node[]>();

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

  /** The identifier of the report; empty if it is missing or the report cannot be read. */
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
    this.askBusy({ kind: 'measure' });
  }

  apply(choice: AskedChoice): void {
    this.askBusy({ kind: 'apply', ...choice });
  }

  /** Send a request that keeps the kernel busy. */
  private askBusy(request: Request): void {
    if (this.live && !this.busy) {
      // Set this before the kernel answers, so that a second click sends no second request.
      this.update({ progress: 'asking the kernel …', busy: true, failure: '' });
      this.onAsk?.(request);
    }
  }

  askGraph(frame: string, index: number): void {
    this.askOnce({ kind: 'graph', frame, index });
  }

  nodes(frame: string, index: number): readonly Node[] | null {
    const frames = this.state.reading.report?.frames.filter(each => each.name === frame) ?? [];
    const graph = frames.flatMap(each => each.graphs).find(each => each.index === index);
    const nodes = graph?.nodes.length ? graph.nodes : this.nodesOfGraphs.get(`${frame}/${index}`);
    if (nodes === undefined) {
      this.askOnce({ kind: 'nodes', frame, index });
    }
    return nodes ?? null;
  }

  askRows(kind: 'verification' | 'outside'): void {
    this.askOnce({ kind });
  }

  private askOnce(request: Request): void {
    const key = JSON.stringify(request);
    if (this.live && !this.sentRequests.has(key)) {
      this.sentRequests.add(key);
      this.onAsk?.(request);
    }
  }

  /** Put a part that the kernel sent separately into the report. */
  private complete(change: (report: Report) => Partial<Report>): void {
    const { reading } = this.state;
    if (reading.report !== null && this.live) {
      this.replace({ reading: { ...reading, report: { ...reading.report, ...change(reading.report) } } });
    }
  }

  /** Show the present activity of a running cell; the rest of the report stays. */
  follow(running: Running | null): void {
    const { reading } = this.state;
    if (reading.report !== null && reading.report.running !== null && running !== null) {
      this.replace({ reading: { ...reading, report: { ...reading.report, running } } });
    }
  }

  /** Replace parts of the state. With a new report, every request may be sent again. */
  update(changes: Partial<IState>): void {
    if (changes.reading !== undefined) {
      this.sentRequests.clear();
      if (changes.reading.report?.identifier !== this.identifier) {
        this.nodesOfGraphs.clear();
      }
    }
    this.replace(changes);
  }

  private replace(changes: Partial<IState>): void {
    this.state = { ...this.state, ...changes };
    for (const listener of [...this.listeners]) {
      listener();
    }
  }

  /** Handle a message from a kernel. */
  receive(message: Message): void {
    switch (message.kind) {
      case 'graph': {
        const graph = readGraph(message.graph);
        this.complete(report => ({
          frames: report.frames.map(frame =>
            frame.name === message.frame ? { ...frame, graphs: withGraph(frame.graphs, graph) } : frame
          )
        }));
        break;
      }
      case 'nodes':
        this.nodesOfGraphs.set(`${message.frame}/${message.index}`, readNodes(message.nodes));
        this.complete(() => ({}));
        break;
      case 'verification':
        this.complete(() => ({ verification_rows: readVerification(message.rows) }));
        break;
      case 'outside':
        this.complete(({ cell }) =>
          cell === null ? {} : { cell: { ...cell, mutated_outside: readOutside(message.rows) } }
        );
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

  /** The kernel no longer answers: keep the report as a static view. */
  leave(): void {
    if (this.live || this.progress !== '' || this.failure !== '') {
      this.update({ live: false, progress: '', busy: false, failure: '' });
    }
  }
}

/** Replace the graph with the same number; if the report lacks it because it was cut, insert it in order. */
function withGraph(graphs: readonly Graph[], graph: Graph): readonly Graph[] {
  return [...graphs.filter(each => each.index !== graph.index), graph].sort((a, b) => a.index - b.index);
}
