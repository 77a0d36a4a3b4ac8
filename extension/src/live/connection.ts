/**
 * The connection of a report in a notebook to the kernel that recorded it.
 *
 * A connection opens a comm for the report's identifier whenever the notebook has a kernel that could answer. It closes
 * the comm when the kernel restarts, ends or becomes unreachable. Usually no kernel answers: for example, a reader
 * opens a notebook from last year without its kernel. So nothing here throws, and nothing is written to the console.
 */

import type { NotebookPanel } from '@jupyterlab/notebook';
import type { Kernel } from '@jupyterlab/services';

import type { IDisposable } from '../source';
import { readMessage } from './source';
import type { ReportSource, Request } from './source';

/** The comm target that aotlab registers in the kernel. */
export const TARGET = 'aotlab.report';

/** How long to wait for a kernel's subshell or answer, in milliseconds. A kernel may never answer. */
const SUBSHELL_MS = 2000;

type Session = NotebookPanel['sessionContext'];

/**
 * For each kernel that a connection asks now: a promise that tells whether the kernel's aotlab answers. Other
 * connections to this kernel wait for the promise, and do not ask if the kernel does not answer.
 */
const asking = new WeakMap<Kernel.IKernelConnection, Promise<boolean>>();

export class Connection implements IDisposable {
  private readonly session: Session;
  private readonly source: ReportSource;
  private comm: Kernel.IComm | null = null;
  private opened = false;
  /** The number of times that this connection was closed. The results of work that began earlier are ignored. */
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

  /** Close the comm, and open another for the present identifier of the source. */
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

  /** The notebook's kernel if it is connected and ready to answer, else null. */
  private reachable(): Kernel.IKernelConnection | null {
    const kernel = this.session.session?.kernel ?? null;
    if (kernel === null || kernel.isDisposed || kernel.connectionStatus !== 'connected') {
      return null;
    }
    return kernel.status === 'idle' || kernel.status === 'busy' ? kernel : null;
  }

  /** Open a comm, but only once for each kernel and each of its starts. */
  private attempt(): void {
    const kernel = this.reachable();
    if (kernel === null || this.tried || this.disposed || this.source.identifier === '') {
      return;
    }
    this.tried = true;
    const round = this.round;
    this.open(kernel, round).catch(() => {
      // The kernel ended meanwhile, or it accepts no comms.
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
      await Promise.race([subshell(kernel, comm), delay(SUBSHELL_MS)]);
    } finally {
      if (earlier === undefined) {
        // Connections that are made later ask again, because the user may import aotlab meanwhile.
        asking.delete(kernel);
      }
      // If the kernel never answers, other connections must not wait for it forever.
      void delay(SUBSHELL_MS).then(() => answer(true));
    }
    if (round !== this.round) {
      answer(true);
      comm.dispose(); // the kernel does not know this comm yet
      return;
    }
    comm.onMsg = message => {
      answer(true);
      this.receive(message.content.data, comm);
    };
    comm.onClose = () => {
      // If this connection closed the comm, that tells nothing about the kernel.
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

  /** Close the comm, so that the view is not live. If `tell` is true, also tell the kernel, if it can be reached. */
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

/**
 * Wait until the kernel has started a subshell for the comm, if it supports subshells. In a subshell, aotlab can answer
 * while a cell runs.
 */
async function subshell(kernel: Kernel.IKernelConnection, comm: Kernel.IComm): Promise<void> {
  await kernel.info;
  if (kernel.supportsSubshells) {
    // JupyterLab's comms have this promise, but their interface does not declare it.
    const started: unknown = 'subshellStarted' in comm ? comm.subshellStarted : undefined;
    await Promise.resolve(started).catch(() => undefined);
  }
}

function delay(milliseconds: number): Promise<void> {
  return new Promise(resolve => {
    setTimeout(resolve, milliseconds);
  });
}

/**
 * Ask the kernel to close a comm.
 *
 * JupyterLab's own `close` sends a message to the comm's subshell, and at once ends this subshell on another channel. A
 * busy kernel then reads a message for a subshell that no longer exists, and writes a traceback into the running cell.
 */
function leave(comm: Kernel.IComm): void {
  try {
    quietly(comm.send({ kind: 'leave' }).done);
  } catch {
    // The kernel ended between the check and the message.
  }
}

/** Ignore the answer to a message. It may never arrive, because the kernel may end first. */
function quietly(done: Promise<unknown>): void {
  done.catch(() => undefined);
}
