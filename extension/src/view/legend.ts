/** What the words in the tables mean. */

import type { Context } from './context';
import { fold } from './context';
import { h } from './dom';

/** Where a mutated input gets its new value: `aotlab.ir.metadata.MutationType`. */
export const MUTATION_TYPES: readonly (readonly [string, string])[] = [
  ['not mutated', 'The function leaves the tensor as it was.'],
  ['mutated in graph', 'The compiled graph itself writes the new values into the caller’s tensor.'],
  ['mutated out of graph', 'The graph returns the new value, and the code after it (the epilogue) writes it back.']
];

/** How an output relates to inputs and intermediates: `aotlab.ir.metadata.OutputType`. */
export const OUTPUT_TYPES: readonly (readonly [string, string])[] = [
  ['non-alias', 'New memory of its own.'],
  ['is input', 'The very tensor that the caller passed.'],
  ['alias of input', 'A view of an input: both share bytes, so a write to one shows in the other.'],
  [
    'alias of intermediate, base saved as output',
    'A view of a tensor made inside; the graph returns that tensor too, so that the view can be made again from it.'
  ],
  [
    'alias of intermediate, base already saved',
    'Another view of a tensor made inside that the graph returns already, for an earlier output.'
  ],
  [
    'alias of intermediate, base is user output',
    'A view of a tensor made inside that the function returns itself as another output.'
  ],
  ['unsafe view', 'Made by an op that looks like a view; nothing else holds its base, so it is treated as new memory.']
];

function legend(context: Context, key: string, title: string, words: readonly (readonly [string, string])[]): HTMLElement {
  return fold(context, `legend ${key}`, [title], () => [
    h('dl', { class: 'al-legend' }, ...words.flatMap(([word, meaning]) => [h('dt', {}, word), h('dd', {}, meaning)]))
  ]);
}

/** Explain what can have happened to an input. */
export function mutationLegend(context: Context): HTMLElement {
  return legend(context, 'mutation', 'What the words mean', [
    ['data mutated', 'Its values changed.'],
    ['metadata mutated', 'Its sizes, strides or offset changed.'],
    ['storage replaced', 'It was given other memory.'],
    ['hidden from autograd', 'Every write went through detach() or the like, so autograd does not know of it.'],
    ['under no_grad', 'Every write happened under no_grad or inference_mode.'],
    ['window of synthetic base', 'The graph takes one tensor in place of inputs that share memory, of which one is mutated.'],
    ['not traced', 'The graph was never traced, so what it would have done is not known.'],
    ...MUTATION_TYPES.slice(1).map(([word, meaning]) => [word.replace('mutated ', ''), meaning] as const)
  ]);
}

/** Explain the output types. */
export function outputLegend(context: Context): HTMLElement {
  return legend(context, 'outputs', 'The seven output types', OUTPUT_TYPES);
}
