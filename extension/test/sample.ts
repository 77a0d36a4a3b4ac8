/** A report as JSON holds it, with a little of everything; tests change copies of it. */

const tensor = (shape: number[], stride: number[], fields: object = {}): object => ({
  dtype: 'float32',
  device: 'cpu',
  layout: 'strided',
  shape,
  stride,
  offset: 0,
  byte_offset: 0,
  nbytes: 4 * shape.reduce((product, length) => product * length, 1),
  ...fields
});

export interface IJson {
  [name: string]: unknown;
}

/** Make the sample anew. `graphs` is how many graphs its one frame has. */
export function sample(graphs = 1): IJson {
  return {
    version: 1,
    name: 'sample',
    identifier: 'r-1',
    created: '2026-01-01T00:00:00+00:00',
    duration_ns: 5_000_000,
    environment: {
      aotlab: '0.1.0',
      torch: '2.13.0',
      python: '3.11.7',
      platform: 'Linux',
      threads: 2,
      devices: [{ kind: 'cpu', index: null, name: 'a processor' }],
      config: [{ name: 'fallback', value: 'eager' }]
    },
    cell: {
      source: '%%aotcompile\nimport torch\nx.add_(1)\nloss.backward()',
      execution_count: 3,
      kind: 'statements',
      error: null,
      error_line: null,
      parts: [
        { first_line: 2, last_line: 2, how: 'python', frames: [], reason: 'an import' },
        { first_line: 3, last_line: 3, how: 'compiled', frames: ['step'], reason: '', compared: 'graph' },
        { first_line: 4, last_line: 4, how: 'not run', frames: [], reason: 'an error came first' }
      ],
      mutated_outside: [{ name: 'weight.grad', kind: 'input', tensor: tensor([3, 4], [4, 1]), mutates_data: true }]
    },
    frames: [
      {
        name: 'step',
        function: 'f.<locals>.step',
        line: { file: '/home/user/a.py', line: 7, function: 'step', code: '' },
        graphs: Array.from({ length: graphs }, (_, index) => graph(index)),
        refusals: [
          {
            graph: 9,
            error: 'RandomOpError',
            reason: 'RandomOp',
            message: 'a random op',
            argument: null,
            line: null,
            outcome: 'ran eagerly',
            at_ns: 10
          }
        ],
        calls: {
          total: 3,
          compiled: 2,
          eager: 1,
          recent: [
            { at_ns: 100, duration_ns: 5000, graph: 0, compiled: true, cold: true },
            { at_ns: 200, duration_ns: 50, graph: 0, compiled: true, cold: false },
            { at_ns: 300, duration_ns: 60, graph: null, compiled: false, cold: false }
          ]
        }
      }
    ],
    graph_break_rows: [
      {
        frame: 'step',
        where: 'step',
        line: null,
        cell_line: null,
        words: '`print()` is called',
        reason: 'a print\nlong text',
        at_ns: 3
      }
    ],
    timing_rows: [timing('eager', 2000), timing('aotlab', 1000)],
    verification_rows: [
      {
        engine: 'aotlab',
        kind: 'value',
        subject: 'out[0]',
        equal: true,
        expected: '1',
        actual: '1',
        frame: 'step',
        graph: 0
      },
      {
        engine: 'aotlab',
        kind: 'stride',
        subject: 'out[1]',
        equal: false,
        expected: '(1, 3)',
        actual: '(3, 1)',
        sentence: 'strides differ',
        frame: 'step',
        graph: 0
      }
    ],
    notes: [],
    summary: null
  };
}

function timing(engine: string, median: number): object {
  const around = { min_ns: median - 2, p10_ns: median - 1, p90_ns: median + 1 };
  const ratio = { over: 'eager', median: 0.5, p10: 0.25, p90: 1.5, noise: 'it changed' };
  const ratios = engine === 'eager' ? [] : [ratio, { over: 'upstream', median: 0.75, p10: 0.7, p90: 0.8 }];
  return {
    engine,
    phase: 'forward',
    median_ns: median,
    ...around,
    repeats: 9,
    ended: '9 rounds',
    frame: 'step',
    graph: 0,
    ratios,
    again: 1.01
  };
}

function graph(index: number): object {
  return {
    index,
    entry: index,
    status: 'compiled',
    frontend: 'direct',
    backend: 'eager',
    misses:
      index === 0
        ? []
        : [{ graph: 0, subject: 'x.size(0)', sentence: '`x` has another shape', line: null, suggestion: 'pad' }],
    training: true,
    at_ns: 0,
    duration_ns: 2_000_000,
    calls: 2,
    reused: index === 0,
    stages: [
      {
        name: 'trace',
        duration_ns: 1_000_000,
        node_count: 4,
        summary: 'traced',
        codes: [{ title: 'joint graph', language: 'python', text: 'def forward(x):  # a.py:7\n    return x' }]
      }
    ],
    inputs: [
      {
        name: 'x',
        kind: 'input',
        tensor: tensor([2, 3], [3, 1]),
        storage: 0,
        mutates_data: true,
        mutates_metadata: false,
        mutates_storage: false,
        mutation_hidden_from_autograd: false,
        mutation_under_no_grad: true,
        mutation_type: 'mutated out of graph',
        requires_grad_after: false
      },
      {
        name: 'weight',
        kind: 'parameter',
        tensor: tensor([3, 4], [4, 1], { requires_grad: true }),
        storage: 1,
        mutates_data: false,
        mutates_metadata: false,
        mutates_storage: false,
        mutation_type: 'not mutated',
        requires_grad_after: true
      },
      { name: 'scale', kind: 'python', value: '2.5' }
    ],
    outputs: [
      {
        name: 'out[0]',
        output_type: 'non-alias',
        raw_type: 'torch.Tensor',
        tensor: tensor([], []),
        storage: 2,
        relation: 'memory of its own'
      },
      {
        name: 'out[1]',
        output_type: 'alias of input',
        raw_type: 'torch.Tensor',
        tensor: tensor([2], [3]),
        storage: 0,
        base_kind: 'input',
        base: 'x',
        views: 'x.select(1, 0)',
        relation: 'view of input x: x.select(1, 0)'
      }
    ],
    storages: [
      {
        number: 0,
        owner: 'input',
        nbytes: 24,
        device: 'cpu',
        spans: [
          { name: 'x', role: 'input', start: 0, stop: 24, mutated: true, writes: 8, may_write: 4 },
          { name: 'out[1]', role: 'output', start: 0, stop: 16, mutated: false }
        ],
        written: [
          { start: 4, length: 4, counts: [2], steps: [12] },
          { start: 20, length: 4, certain: false }
        ]
      },
      {
        number: 1,
        owner: 'input',
        nbytes: 48,
        device: 'cpu',
        spans: [{ name: 'weight', role: 'input', start: 0, stop: 48 }],
        group: 0
      }
    ],
    storage_groups: [{ title: '1 storage with one tensor, unwritten', count: 1, nbytes: 48 }],
    nodes: [{ stage: 'trace', part: 'joint', name: 'mm', op: 'call_function', target: 'aten.mm', phase: 'forward' }],
    saved: [{ name: 'mm', tensor: tensor([2, 4], [4, 1]), nbytes: 32, reason: 'read by relu’s backward' }],
    kernels: [
      {
        name: 'kernel_0',
        language: 'c++',
        graph_name: 'g',
        kind: 'forward',
        source: 'int main() {}',
        from_cache: true
      }
    ],
    guards: [{ kind: 'shape', subject: 'x', sentence: '`x` has shape (2, 3)' }]
  };
}
