/** Explain the words in the tables. */

import type { IContext } from './context';
import { fold } from './context';
import { h } from './dom';

/** The values of `aotlab.ir.metadata.MutationType`, where a mutated input gets its new value, with explanations. */
export const MUTATION_TYPES: readonly (readonly [string, string])[] = [
  ['not mutated', 'The function leaves the tensor as it was.'],
  ['mutated in graph', 'The compiled graph itself writes the new values into the caller’s tensor.'],
  ['mutated out of graph', 'The graph returns the new value, and the code after it (the epilogue) writes it back.']
];

/** The values of `aotlab.ir.metadata.OutputType`, the relation of an output to its base, with explanations. */
export const OUTPUT_TYPES: readonly (readonly [string, string])[] = [
  ['non-alias', 'New memory.'],
  ['is input', 'The tensor that the caller passed.'],
  ['alias of input', 'A view of an input: both share bytes, so a write to one shows in the other.'],
  [
    'alias of intermediate, base saved as output',
    'A view of a tensor that the function computes. The graph also returns this tensor to make the view again.'
  ],
  [
    'alias of intermediate, base already saved',
    'Another view of a tensor that the graph already returns for an earlier output.'
  ],
  [
    'alias of intermediate, base is user output',
    'A view of a tensor that the function computes and returns as another output.'
  ],
  ['unsafe view', 'The result of an op that looks like a view. Nothing else uses its base, so it counts as new memory.']
];

function legend(
  context: IContext,
  key: string,
  title: string,
  words: readonly (readonly [string, string])[]
): HTMLElement {
  return fold(context, `legend ${key}`, [title], () => [
    h('dl', { class: 'al-legend' }, ...words.flatMap(([word, meaning]) => [h('dt', {}, word), h('dd', {}, meaning)]))
  ]);
}

/** Explain the changes of an input. */
export function mutationLegend(context: IContext): HTMLElement {
  return legend(context, 'mutation', 'What the words mean', [
    ['data mutated', 'Its values changed.'],
    ['metadata mutated', 'Its sizes, strides or offset changed.'],
    ['storage replaced', 'It got other memory.'],
    ['hidden from autograd', 'Every write was hidden from autograd, for example by detach().'],
    ['under no_grad', 'Every write happened under no_grad or inference_mode.'],
    [
      'window of synthetic base',
      'Inputs share memory, and one of them is mutated. The graph takes one tensor instead of these inputs.'
    ],
    ['not traced', 'The graph was never traced, so its effects are not known.'],
    ...MUTATION_TYPES.slice(1).map(([word, meaning]) => [word.replace('mutated ', ''), meaning] as const)
  ]);
}

/** Explain the output types. */
export function outputLegend(context: IContext): HTMLElement {
  return legend(context, 'outputs', 'The seven output types', OUTPUT_TYPES);
}
