/** Code in pieces, for its colours: a light reading of Python (Triton is Python) and C++. */

export type Kind = 'keyword' | 'string' | 'comment' | 'number' | 'call' | 'name' | 'plain';

export interface Token {
  readonly kind: Kind;
  readonly text: string;
}

const PYTHON_WORDS: ReadonlySet<string> = new Set(
  ('and as assert async await break class continue def del elif else except finally for from global if import in is lambda ' +
    'nonlocal not or pass raise return try while with yield None True False').split(' ')
);
const CPP_WORDS: ReadonlySet<string> = new Set(
  ('#include #define #if #ifdef #ifndef #else #endif #pragma alignas auto bool break case char class const constexpr continue ' +
    'decltype default delete do double else enum explicit extern false float for if inline int int8_t int16_t int32_t int64_t ' +
    'uint8_t uint16_t uint32_t uint64_t long namespace new nullptr operator private public return short signed sizeof static ' +
    'static_cast struct switch template this throw true typedef typename union unsigned using virtual void volatile while').split(' ')
);

const NUMBER = String.raw`0[xX][\da-fA-F]+|(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[a-zA-Z]*`;
/** What does not end is taken to go on to the end, of the line or of the text. */
const QUOTED = String.raw`"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?`;
const LONG = String.raw`"""(?:\\[\s\S]|[^\\])*?(?:"""|$)|'''(?:\\[\s\S]|[^\\])*?(?:'''|$)`;

function grammar(comment: string, string: string, word: string): RegExp {
  return new RegExp(`(?<comment>${comment})|(?<string>${string})|(?<word>${word})|(?<number>${NUMBER})`, 'g');
}

const PYTHON = grammar(String.raw`#[^\n]*`, `[rRbBfFuU]{0,2}(?:${LONG}|${QUOTED})`, String.raw`[A-Za-z_]\w*`);
const CPP = grammar(String.raw`//[^\n]*|/\*[\s\S]*?(?:\*/|$)`, QUOTED, String.raw`#?[A-Za-z_]\w*`);

/** Read code into the tokens of its lines. */
export function tokenLines(text: string, language: string): Token[][] {
  const [pattern, keywords] = language === 'c++' ? [CPP, CPP_WORDS] : [PYTHON, PYTHON_WORDS];
  let line: Token[] = [];
  const lines = [line];
  const add = (kind: Kind, piece: string): void => {
    piece.split('\n').forEach((row, index) => {
      if (index > 0) {
        lines.push((line = []));
      }
      if (row !== '') {
        line.push({ kind, text: row });
      }
    });
  };
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    const { comment, string, number } = match.groups ?? {};
    const [piece] = match;
    add('plain', text.slice(end, match.index));
    end = match.index + piece.length;
    const word = keywords.has(piece) ? 'keyword' : text[end] === '(' ? 'call' : 'name';
    add(comment !== undefined ? 'comment' : string !== undefined ? 'string' : number !== undefined ? 'number' : word, piece);
  }
  add('plain', text.slice(end));
  return lines;
}
