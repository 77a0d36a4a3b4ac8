import assert from 'node:assert/strict';
import { beforeEach, test } from 'node:test';

import type { NotebookPanel } from '@jupyterlab/notebook';

import { Connection } from '../src/live/connection';
import { ReportSource } from '../src/live/source';
import { readReport } from '../src/model/report';
import { counted } from './counted';
import { sample } from './sample';

/** What a signal of Lumino's does, as far as connections use it. */
class Signal {
  private slots: { slot: () => void; owner: unknown }[] = [];

  connect(slot: () => void, owner: unknown): boolean {
    this.slots.push({ slot, owner });
    return true;
  }

  disconnect(slot: () => void, owner: unknown): boolean {
    this.slots = this.slots.filter(each => each.slot !== slot || each.owner !== owner);
    return true;
  }

  emit(): void {
    [...this.slots].forEach(({ slot, owner }) => slot.call(owner));
  }

  get size(): number {
    return this.slots.length;
  }
}

type Handler = (message: unknown) => void;

class FakeComm {
  isDisposed = false;
  onMsg: Handler = () => undefined;
  onClose: Handler = () => undefined;
  readonly sent: unknown[] = [];
  opened: unknown = null;

  open(data: unknown): { done: Promise<unknown> } {
    this.opened = data;
    // As when the kernel ends before it answered.
    return { done: Promise.reject(new Error('Canceled future')) };
  }

  send(data: unknown): { done: Promise<unknown> } {
    if (this.isDisposed) {
      throw new Error('Cannot send');
    }
    this.sent.push(data);
    if ((data as { kind: string }).kind === 'leave') {
      // Nobody else closes it: JupyterLab would end its subshell before the kernel has read so.
      this.onClose({});
      this.dispose();
    }
    return { done: Promise.reject(new Error('Canceled future')) };
  }

  dispose(): void {
    this.isDisposed = true;
  }

  says(data: unknown): void {
    this.onMsg({ content: { data } });
  }
}

class FakeKernel {
  isDisposed = false;
  status = 'idle';
  connectionStatus = 'connected';
  supportsSubshells = false;
  info = Promise.resolve({});
  refuses = false;
  readonly comms: FakeComm[] = [];

  createComm(target: string): FakeComm {
    assert.equal(target, 'aotlab.report');
    if (this.refuses) {
      throw new Error('Comms are disabled on this kernel connection');
    }
    const comm = new FakeComm();
    this.comms.push(comm);
    return comm;
  }
}

class FakeSession {
  readonly kernelChanged = new Signal();
  readonly statusChanged = new Signal();
  readonly connectionStatusChanged = new Signal();
  readonly disposed = new Signal();
  session: { kernel: FakeKernel | null } | null = { kernel: new FakeKernel() };

  get kernel(): FakeKernel {
    const kernel = this.session?.kernel ?? null;
    assert.ok(kernel !== null);
    return kernel;
  }

  status(status: string): void {
    this.kernel.status = status;
    this.statusChanged.emit();
  }

  get listeners(): number {
    const signals = [this.kernelChanged, this.statusChanged, this.connectionStatusChanged, this.disposed];
    return signals.reduce((sum, signal) => sum + signal.size, 0);
  }
}

let session: FakeSession;
let source: ReportSource;

beforeEach(() => {
  session = new FakeSession();
  source = reportSource('r-1');
});

function reportSource(identifier: string): ReportSource {
  const newSource = new ReportSource();
  newSource.update({ reading: readReport(counted({ ...sample(), identifier })) });
  return newSource;
}

function connect(to = source): Connection {
  return new Connection(session as unknown as NotebookPanel['sessionContext'], to);
}

/** Let promises that are already settled run on. */
async function settle(): Promise<void> {
  for (let turn = 0; turn < 20; turn += 1) {
    await Promise.resolve();
  }
}

async function live(): Promise<FakeComm> {
  await settle();
  const comm = session.kernel.comms.at(-1);
  assert.ok(comm !== undefined);
  comm.says({ kind: 'report', report: { ...sample(), name: 'from the kernel' } });
  assert.equal(source.live, true);
  return comm;
}

test('the kernel is asked for the identifier, and the first report makes it live', async () => {
  const connection = connect();
  await settle();
  assert.equal(source.live, false);
  const comm = await live();
  assert.deepEqual(comm.opened, { identifier: 'r-1' });
  assert.equal(source.reading.report?.name, 'from the kernel');
  source.measure();
  source.measure();
  assert.deepEqual(comm.sent, [{ kind: 'measure' }]);
  connection.dispose();
  assert.deepEqual(comm.sent, [{ kind: 'measure' }, { kind: 'leave' }]);
  assert.equal(comm.isDisposed, true);
  assert.equal(session.listeners, 0);
});

for (const end of ['restarting', 'autorestarting', 'dead', 'terminating']) {
  test(`a kernel that is ${end} leaves the last report as a still; it is asked again when it is back`, async () => {
    const connection = connect();
    const comm = await live();
    session.status(end);
    assert.equal(source.live, false);
    assert.equal(source.reading.report?.name, 'from the kernel');
    // What still arrives from before is not heard.
    comm.says({ kind: 'report', report: sample() });
    assert.equal(source.live, false);
    session.status('starting');
    session.status('idle');
    await live();
    assert.equal(session.kernel.comms.length, 2);
    connection.dispose();
  });
}

test('a kernel that is shut down, and one that is started instead', async () => {
  const connection = connect();
  await live();
  session.session = { kernel: null };
  session.kernelChanged.emit();
  assert.equal(source.live, false);
  session.session = { kernel: new FakeKernel() };
  session.kernelChanged.emit();
  await live();
  connection.dispose();
});

test('a comm that the kernel closes leaves a still', async () => {
  const connection = connect();
  const comm = await live();
  comm.onClose({});
  assert.equal(source.live, false);
  connection.dispose();
});

test('a kernel that restarts while it is being asked is asked anew, once', async () => {
  let informed: (info: object) => void = () => undefined;
  session.kernel.info = new Promise(resolve => {
    informed = resolve;
  });
  const connection = connect();
  await settle();
  session.status('restarting');
  informed({});
  await settle();
  assert.deepEqual(
    session.kernel.comms.map(comm => comm.opened),
    [null]
  );
  session.status('idle');
  await live();
  assert.deepEqual(
    session.kernel.comms.map(comm => comm.opened),
    [null, { identifier: 'r-1' }]
  );
  connection.dispose();
});

test('a connection that is lost and found', async () => {
  const connection = connect();
  await live();
  session.kernel.connectionStatus = 'connecting';
  session.connectionStatusChanged.emit();
  assert.equal(source.live, false);
  session.kernel.connectionStatus = 'connected';
  session.connectionStatusChanged.emit();
  await live();
  connection.dispose();
});

test('busy and idle do not ask again', async () => {
  const connection = connect();
  await settle();
  session.kernel.comms[0]?.says({ kind: 'unknown' });
  session.kernel.comms[0]?.onClose({});
  for (const status of ['busy', 'idle', 'busy', 'idle']) {
    session.status(status);
    await settle();
  }
  assert.equal(session.kernel.comms.length, 1);
  assert.equal(source.live, false);
  connection.dispose();
});

test('a kernel without aotlab is asked once, however many reports the notebook holds', async () => {
  const sources = ['a', 'b', 'c'].map(reportSource);
  const connections = sources.map(connect);
  await settle();
  assert.equal(session.kernel.comms.length, 1);
  session.kernel.comms[0]?.onClose({});
  await settle();
  assert.equal(session.kernel.comms.length, 1);
  assert.deepEqual(
    sources.map(each => each.live),
    [false, false, false]
  );
  connections.forEach(each => each.dispose());
});

test('a report that comes after the question was sent asks for itself: aotlab may have come with it', async () => {
  const before = reportSource('before');
  const first = connect(before);
  await settle();
  assert.deepEqual(
    session.kernel.comms.map(comm => comm.opened),
    [{ identifier: 'before' }]
  );
  const second = connect();
  await settle();
  session.kernel.comms[0]?.onClose({});
  await live();
  assert.equal(before.live, false);
  [first, second].forEach(each => each.dispose());
});

test('a report that goes away while it asks for all does not silence the others', async () => {
  const first = connect(reportSource('gone'));
  const second = connect();
  first.dispose();
  await live();
  assert.deepEqual(session.kernel.comms.at(-1)?.opened, { identifier: 'r-1' });
  second.dispose();
});

test('nor does one that goes away between the question and the answer', async () => {
  const first = connect(reportSource('gone'));
  const second = connect();
  await settle();
  assert.equal(session.kernel.comms.length, 1);
  first.dispose();
  await live();
  assert.deepEqual(session.kernel.comms.at(-1)?.opened, { identifier: 'r-1' });
  second.dispose();
});

test('once a kernel has answered, the other reports ask too', async () => {
  const sources = ['a', 'b', 'c'].map(reportSource);
  const connections = sources.map(connect);
  await settle();
  session.kernel.comms[0]?.says({ kind: 'unknown' });
  session.kernel.comms[0]?.onClose({});
  await settle();
  assert.deepEqual(
    session.kernel.comms.map(comm => comm.opened),
    [{ identifier: 'a' }, { identifier: 'b' }, { identifier: 'c' }]
  );
  connections.forEach(each => each.dispose());
});

test('no kernel, one that takes no comms, one that is gone: nothing is thrown', async () => {
  session.kernel.refuses = true;
  connect().dispose();
  const withoutComms = connect();
  await settle();
  assert.equal(source.live, false);
  withoutComms.dispose();
  session.kernel.refuses = false;
  const withClosedComm = connect();
  const comm = await live();
  comm.isDisposed = true;
  source.measure();
  assert.equal(source.live, false);
  withClosedComm.dispose();
  session.session = null;
  const withoutKernel = connect();
  await settle();
  session.statusChanged.emit();
  withoutKernel.dispose();
  withoutKernel.dispose();
});

test('another report in the same output is asked for by its own name', async () => {
  const connection = connect();
  const first = await live();
  source.update({ reading: readReport(counted({ ...sample(), identifier: 'r-2' })) });
  connection.retry();
  assert.equal(first.isDisposed, true);
  await settle();
  assert.deepEqual(session.kernel.comms.at(-1)?.opened, { identifier: 'r-2' });
  connection.dispose();
});

test('messages that are none of ours are not heard', async () => {
  const connection = connect();
  const comm = await live();
  for (const data of [null, 3, {}, { kind: 'explode' }, { kind: 'progress' }]) {
    comm.says(data);
  }
  assert.equal(source.live, true);
  comm.says({ kind: 'report', report: 'broken' });
  assert.match(source.reading.problem ?? '', /not an aotlab report/);
  connection.dispose();
});
