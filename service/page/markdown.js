// Markdown to HTML by markdown-it, block by block. What a model writes as HTML stays text.

import MarkdownIt from "./vendor/markdown-it-15.0.3/markdown-it.esm.min.mjs";
import { tasklist } from "./vendor/mdit-plugin-tasklist-0.23.2/index.js";
import { tex } from "./vendor/mdit-plugin-tex-0.24.2/index.js";

const LONGEST_PARAGRAPH = 20_000; // characters; a longer one is shown as it is, for its marks could take seconds
const FIRST_LEVEL = 3; // of an answer's headings: h1 and h2 are the page's own
const LAST_LEVEL = 6;

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true, maxNesting: 30 });
const escape = markdown.utils.escapeHtml;

markdown.use(tasklist, { label: false });
markdown.use(tex, {
  delimiters: "all",
  render: (content, display) => `<span class="${display ? "math display" : "math"}">${escape(content)}</span>`,
});
// A definition far below would change what stands above it, and readers like to see where a link goes.
markdown.disable("reference");

markdown.core.ruler.before("inline", "long", ({ tokens }) => {
  for (const token of tokens) {
    if (token.type === "inline" && token.content.length > LONGEST_PARAGRAPH) token.type = "long";
  }
});
markdown.core.ruler.push("page", ({ tokens }) => {
  for (const token of tokens) {
    const alignment = /^text-align:(\w+)$/.exec(token.attrGet("style") ?? "");
    if (alignment) token.attrs = [["class", alignment[1]]];
  }
});

Object.assign(markdown.renderer.rules, {
  long: (tokens, i) => escape(tokens[i].content),
  fence: (tokens, i) => code(tokens[i]),
  code_block: (tokens, i) => code(tokens[i]),
  table_open: () => '<div class="table"><table>',
  table_close: () => "</table></div>",
  // Nothing is loaded from elsewhere: a picture is a link.
  image: (tokens, i, options, env, self) => {
    const source = tokens[i].attrGet("src");
    return `<a href="${escape(source)}">${escape(self.renderInlineAsText(tokens[i].children, options, env) || source)}</a>`;
  },
});

function code({ info, content }) {
  const language = markdown.utils.unescapeAll(info).trim().split(/\s/, 1)[0];
  return `<pre data-language="${escape(language)}"><code>${escape(content.replace(/\n$/, ""))}</code></pre>`;
}

/**
 * The blocks of the text, each with where it begins, what it `is` in markdown-it's words, html() for its one element,
 * and the `outline` behind it: the levels, as they are written, of the last heading and of those that it stands under.
 * `outline` is that before the text.
 */
export function blocksOf(text, outline) {
  const starts = lineStarts(text);
  const groups = [];
  let group = [];
  let depth = 0;
  for (const token of markdown.parse(text, {})) {
    group.push(token);
    depth += token.nesting;
    if (depth > 0) continue;
    groups.push(group);
    group = [];
  }
  return groups.map((tokens, i) => {
    outline = outlined(tokens, outline);
    const start = starts[tokens[0].map[0]];
    const source = text.slice(start, i + 1 < groups.length ? starts[groups[i + 1][0].map[0]] : undefined);
    const html = () => markdown.renderer.render(tokens, markdown.options, {});
    return { start, source, is: tokens[0].type, html, outline };
  });
}

/** Gives headings the levels that leave no gap, whichever the answer begins with. Returns the outline behind them. */
function outlined(tokens, outline) {
  for (const token of tokens) {
    if (!token.type.startsWith("heading_")) continue;
    if (token.type === "heading_open") {
      const written = Number(token.tag[1]);
      outline = [...outline.filter((above) => above < written), written];
    }
    token.tag = `h${Math.min(FIRST_LEVEL + outline.length - 1, LAST_LEVEL)}`;
  }
  return outline;
}

function lineStarts(text) {
  const starts = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) starts.push(at + 1);
  return starts;
}
