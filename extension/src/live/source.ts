/** A report that changes: set from a notebook's output, from a kernel's messages, or from a widget's traits. */

import { readReport } from '../model/report';
import type { Reading } from '../model/report';
import type { Source } from '../source';

/** What a kernel says of a report. */
export type Message =
  | { readonly kind: 'report'; readonly report: unknown; readonly figure: string | null }
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
      return { kind: 'report', report: fields['report'], figure: words(fields['figure']) || null };
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

interface State {
  readonly reading: Reading;
  readonly figure: string | null;
  readonly progress: string;
  readonly busy: boolean;
  readonly failure: string;
  readonly live: boolean;
}

/** A source whose state is replaced as a whole, and which tells its listeners. */
export class ReportSource implements Source {
  /** Called when the reader asks to measure. */
  onMeasure: (() => void) | null = null;

  private state: State = { reading: readReport(null), figure: null, progress: '', busy: false, failure: '', live: false };
  private readonly listeners = new Set<() => void>();

  get reading(): Reading {
    return this.state.reading;
  }

  get figure(): string | null {
    return this.state.figure;
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
      this.onMeasure?.();
    }
  }

  /** Replace part of the state. */
  update(changes: Partial<State>): void {
    this.state = { ...this.state, ...changes };
    for (const listener of [...this.listeners]) {
      listener();
    }
  }

  /** Take in what a kernel says. */
  receive(message: Message): void {
    switch (message.kind) {
      case 'report':
        this.update({
          reading: readReport(message.report),
          figure: message.figure,
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
