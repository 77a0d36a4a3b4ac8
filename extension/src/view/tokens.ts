/** Split code into tokens for its colours, with a simple lexer for Python (and Triton) and C++. */

export type Kind = 'keyword' | 'string' | 'comment' | 'number' | 'call' | 'name' | 'plain';

export interface IToken {
  readonly kind: Kind;
  readonly text: string;
}

const PYTHON_WORDS: ReadonlySet<string> = new Set(
  (
    'and as assert async await break class continue def del elif else except finally for from global if import in is lambda ' +
    'nonlocal not or pass raise return try while with yield None True False'
  ).split(' ')
);
const CPP_WORDS: ReadonlySet<string> = new Set(
  (
    '#include #define #if #ifdef #ifndef #else #endif #pragma alignas auto bool break case char class const constexpr continue ' +
    'decltype default delete do double else enum explicit extern false float for if inline int int8_t int16_t int32_t int64_t ' +
    'uint8_t uint16_t uint32_t uint64_t long namespace new nullptr operator private public return short signed sizeof static ' +
    'static_cast struct switch template this throw true typedef typename union unsigned using virtual void volatile while'
  ).split(' ')
);

const NUMBER = String.raw`0[xX][\da-fA-F]+|(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[a-zA-Z]*`;
/** A string without an end continues to the end of the line or of the text. */
const QUOTED = String.raw`"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?`;
const LONG = String.raw`"""(?:\\[\s\S]|[^\\])*?(?:"""|$)|'''(?:\\[\s\S]|[^\\])*?(?:'''|$)`;

interface ILanguage {
  readonly keywords: ReadonlySet<string>;
  readonly anyToken: RegExp;
  /** Matches only comments and strings. A string may span several lines. */
  readonly commentOrString: RegExp;
}

function language(keywords: ReadonlySet<string>, comment: string, string: string, word: string): ILanguage {
  const commentOrString = `(?<comment>${comment})|(?<string>${string})`;
  return {
    keywords,
    anyToken: new RegExp(`${commentOrString}|(?<word>${word})|(?<number>${NUMBER})`, 'g'),
    commentOrString: new RegExp(commentOrString, 'g')
  };
}

const PYTHON = language(
  PYTHON_WORDS,
  String.raw`#[^\n]*`,
  `[rRbBfFuU]{0,2}(?:${LONG}|${QUOTED})`,
  String.raw`[A-Za-z_]\w*`
);
const CPP = language(CPP_WORDS, String.raw`//[^\n]*|/\*[\s\S]*?(?:\*/|$)`, QUOTED, String.raw`#?[A-Za-z_]\w*`);

/** The tokens of code. The tokens of a line are computed when they are first needed. */
export class Code {
  readonly lines: readonly string[];
  private readonly language: ILanguage;
  private readonly tokensOfLines = new Map<number, readonly IToken[]>();
  /** For each line that begins inside of a string or comment: that kind, and the column where the token ends. */
  private readonly openTokens = new Map<number, readonly [Kind, number]>();

  constructor(text: string, name: string) {
    this.language = name === 'c++' ? CPP : PYTHON;
    this.lines = text.split('\n');
    let [line, start] = [0, 0];
    for (const match of text.matchAll(this.language.commentOrString)) {
      const rows = match[0].split('\n');
      if (rows.length > 1) {
        while (start + (this.lines[line]?.length ?? 0) < match.index) {
          start += (this.lines[line]?.length ?? 0) + 1;
          line += 1;
        }
        const kind = match.groups?.['comment'] === undefined ? 'string' : 'comment';
        rows.slice(1).forEach((row, index) => this.openTokens.set(line + 1 + index, [kind, row.length]));
      }
    }
  }

  /** The tokens of a line. */
  tokens(line: number): readonly IToken[] {
    const cached = this.tokensOfLines.get(line);
    if (cached !== undefined) {
      return cached;
    }
    const text = this.lines[line] ?? '';
    const tokens: IToken[] = [];
    const add = (kind: Kind, piece: string): void => {
      if (piece !== '') {
        tokens.push({ kind, text: piece });
      }
    };
    const [kind, column] = this.openTokens.get(line) ?? ['plain', 0];
    add(kind, text.slice(0, column));
    let end = column;
    for (const match of text.slice(column).matchAll(this.language.anyToken)) {
      const { comment, string, number } = match.groups ?? {};
      const [piece] = match;
      add('plain', text.slice(end, column + match.index));
      end = column + match.index + piece.length;
      const word = this.language.keywords.has(piece) ? 'keyword' : text[end] === '(' ? 'call' : 'name';
      add(
        comment !== undefined ? 'comment' : string !== undefined ? 'string' : number !== undefined ? 'number' : word,
        piece
      );
    }
    add('plain', text.slice(end));
    this.tokensOfLines.set(line, tokens);
    return tokens;
  }
}
