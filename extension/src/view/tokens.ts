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

interface Language {
  readonly keywords: ReadonlySet<string>;
  readonly all: RegExp;
  /** Only what may go over several lines, and what it may stand in. */
  readonly long: RegExp;
}

function language(keywords: ReadonlySet<string>, comment: string, string: string, word: string): Language {
  const long = `(?<comment>${comment})|(?<string>${string})`;
  return { keywords, all: new RegExp(`${long}|(?<word>${word})|(?<number>${NUMBER})`, 'g'), long: new RegExp(long, 'g') };
}

const PYTHON = language(PYTHON_WORDS, String.raw`#[^\n]*`, `[rRbBfFuU]{0,2}(?:${LONG}|${QUOTED})`, String.raw`[A-Za-z_]\w*`);
const CPP = language(CPP_WORDS, String.raw`//[^\n]*|/\*[\s\S]*?(?:\*/|$)`, QUOTED, String.raw`#?[A-Za-z_]\w*`);

/** The tokens of code, read line by line when they are asked for. */
export class Code {
  readonly lines: readonly string[];
  private readonly language: Language;
  private readonly read = new Map<number, readonly Token[]>();
  /** For lines that something longer than a line reaches into: what it is, and up to which column. */
  private readonly begun = new Map<number, readonly [Kind, number]>();

  constructor(text: string, name: string) {
    this.language = name === 'c++' ? CPP : PYTHON;
    this.lines = text.split('\n');
    let [line, start] = [0, 0];
    for (const match of text.matchAll(this.language.long)) {
      const rows = match[0].split('\n');
      if (rows.length > 1) {
        while (start + (this.lines[line]?.length ?? 0) < match.index) {
          start += (this.lines[line]?.length ?? 0) + 1;
          line += 1;
        }
        const kind = match.groups?.['comment'] === undefined ? 'string' : 'comment';
        rows.slice(1).forEach((row, index) => this.begun.set(line + 1 + index, [kind, row.length]));
      }
    }
  }

  /** The tokens of a line. */
  tokens(line: number): readonly Token[] {
    const known = this.read.get(line);
    if (known !== undefined) {
      return known;
    }
    const text = this.lines[line] ?? '';
    const found: Token[] = [];
    const add = (kind: Kind, piece: string): void => {
      if (piece !== '') {
        found.push({ kind, text: piece });
      }
    };
    const [kind, column] = this.begun.get(line) ?? ['plain', 0];
    add(kind, text.slice(0, column));
    let end = column;
    for (const match of text.slice(column).matchAll(this.language.all)) {
      const { comment, string, number } = match.groups ?? {};
      const [piece] = match;
      add('plain', text.slice(end, column + match.index));
      end = column + match.index + piece.length;
      const word = this.language.keywords.has(piece) ? 'keyword' : text[end] === '(' ? 'call' : 'name';
      add(comment !== undefined ? 'comment' : string !== undefined ? 'string' : number !== undefined ? 'number' : word, piece);
    }
    add('plain', text.slice(end));
    this.read.set(line, found);
    return found;
  }
}
