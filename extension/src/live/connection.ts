/**
 * The way from a report in a notebook to the kernel that made it.
 *
 * A connection opens a comm for the report's identifier whenever the notebook has a kernel that could answer, and lets
 * go of it when the kernel restarts, ends or cannot be reached. That nobody answers is ordinary: a notebook that was
 * saved last year is read without its kernel. So nothing here throws, and nothing is written to the console.
 */

import type { NotebookPanel } from '@jupyterlab/notebook';
import type { Kernel } from '@jupyterlab/services';

import type { Disposable } from '../source';
import { readMessage } from './source';
import type { ReportSource, Request } from './source';

/** The comm target that aotlab registers in the kernel. */
export const TARGET = 'aotlab.report';

/** How long to wait for what a kernel may never give, in milliseconds. */
const SUBSHELL_MS = 2000;

type Session = NotebookPanel['sessionContext'];

/** Whether a kernel's aotlab answers, for kernels that are about to be asked: reports that were there ask only once. */
const asking = new WeakMap<Kernel.IKernelConnection, Promise<boolean>>();

export class Connection implements Disposable {
  private readonly session: Session;
  private readonly source: ReportSource;
  private comm: Kernel.IComm | null = null;
  private opened = false;
  /** Counts how often everything began anew; what was begun for an earlier number is stale. */
  private round = 0;
  private tried = false;
  private disposed = false;

  constructor(session: Session, source: ReportSource) {
    this.session = session;
    this.source = source;
    session.kernelChanged.connect(this.onKernel, this);
    session.statusChanged.connect(this.onStatus, this);
    session.connectionStatusChanged.connect(this.onStatus, this);
    session.disposed.connect(this.dispose, this);
    source.onAsk = request => this.send(request);
    this.attempt();
  }

  /** Ask again, for the identifier that the source has now. */
  retry(): void {
    this.letGo(true);
    this.attempt();
  }

  dispose(): void {
    if (this.disposed) {
      return;
    }
    this.disposed = true;
    this.session.kernelChanged.disconnect(this.onKernel, this);
    this.session.statusChanged.disconnect(this.onStatus, this);
    this.session.connectionStatusChanged.disconnect(this.onStatus, this);
    this.session.disposed.disconnect(this.dispose, this);
    this.source.onAsk = null;
    this.letGo(true);
  }

  private onKernel(): void {
    this.letGo(false);
    this.attempt();
  }

  private onStatus(): void {
    if (this.reachable() === null) {
      this.letGo(false);
    } else {
      this.attempt();
    }
  }

  /** The kernel, if it can answer. */
  private reachable(): Kernel.IKernelConnection | null {
    const kernel = this.session.session?.kernel ?? null;
    if (kernel === null || kernel.isDisposed || kernel.connectionStatus !== 'connected') {
      return null;
    }
    return kernel.status === 'idle' || kernel.status === 'busy' ? kernel : null;
  }

  /** Open a comm, once per kernel and start of it. */
  private attempt(): void {
    const kernel = this.reachable();
    if (kernel === null || this.tried || this.disposed || this.source.identifier === '') {
      return;
    }
    this.tried = true;
    const round = this.round;
    this.open(kernel, round).catch(() => {
      // The kernel went away in the middle, or takes no comms.
      if (round === this.round) {
        this.source.leave();
      }
    });
  }

  private async open(kernel: Kernel.IKernelConnection, round: number): Promise<void> {
    const earlier = asking.get(kernel);
    if (earlier !== undefined && !(await earlier)) {
      return;
    }
    if (round !== this.round) {
      return;
    }
    const comm = kernel.createComm(TARGET);
    this.comm = comm;
    let answer: (answered: boolean) => void = () => undefined;
    if (earlier === undefined) {
      const answered = new Promise<boolean>(resolve => {
        answer = resolve;
      });
      asking.set(kernel, answered);
    }
    try {
      await Promise.race([subshell(kernel, comm), later(SUBSHELL_MS)]);
    } finally {
      if (earlier === undefined) {
        // A report that comes from now on may come with aotlab, which this question does not find yet.
        asking.delete(kernel);
      }
      // A kernel that says nothing at all must not keep other reports waiting.
      void later(SUBSHELL_MS).then(() => answer(true));
    }
    if (round !== this.round) {
      answer(true);
      comm.dispose(); // the kernel has not heard of it
      return;
    }
    comm.onMsg = message => {
      answer(true);
      this.receive(message.content.data, comm);
    };
    comm.onClose = () => {
      // If it was us who closed it, nothing is known of the kernel.
      answer(this.comm !== comm);
      if (this.comm === comm) {
        this.comm = null;
        this.source.leave();
      }
    };
    this.opened = true;
    quietly(comm.open({ identifier: this.source.identifier }).done);
  }

  private receive(data: unknown, comm: Kernel.IComm): void {
    const message = readMessage(data);
    if (message !== null && comm === this.comm) {
      this.source.receive(message);
    }
  }

  private send(data: Request): void {
    const kernel = this.reachable();
    if (kernel === null || this.comm === null || this.comm.isDisposed) {
      this.source.leave();
      return;
    }
    try {
      quietly(this.comm.send(data).done);
    } catch {
      this.source.leave();
    }
  }

  /** Go back to the still report; tell the kernel so if it is there to be told. */
  private letGo(tell: boolean): void {
    const { comm, opened } = this;
    this.round += 1;
    this.tried = false;
    this.comm = null;
    this.opened = false;
    if (comm !== null && opened && tell && this.reachable() !== null) {
      leave(comm);
    }
    this.source.leave();
  }
}

/** Wait until the comm's own thread in the kernel is there, where the kernel has such; it answers while a cell runs. */
async function subshell(kernel: Kernel.IKernelConnection, comm: Kernel.IComm): Promise<void> {
  await kernel.info;
  if (kernel.supportsSubshells) {
    // JupyterLab's comms have this promise, though their interface does not name it.
    const started: unknown = 'subshellStarted' in comm ? comm.subshellStarted : undefined;
    await Promise.resolve(started).catch(() => undefined);
  }
}

function later(milliseconds: number): Promise<void> {
  return new Promise(resolve => {
    setTimeout(resolve, milliseconds);
  });
}

/**
 * Have the kernel close a comm.
 *
 * JupyterLab's own `close` ends the comm's subshell as soon as its message is sent, on another channel: a busy kernel
 * then reads the message for a subshell that is gone, and writes a traceback into the running cell.
 */
function leave(comm: Kernel.IComm): void {
  try {
    quietly(comm.send({ kind: 'leave' }).done);
  } catch {
    // It went away between the question and the deed.
  }
}

/** A message whose answer nobody waits for, and that may never come: the kernel may end first. */
function quietly(done: Promise<unknown>): void {
  done.catch(() => undefined);
}
