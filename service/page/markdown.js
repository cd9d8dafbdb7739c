// The small part of Markdown that models write, as plain data. Linear in the text, whatever the text is.
//
// Blocks: {kind: "paragraph" | "heading" | "rule" | "code" | "quote" | "list", source, ...}
// Inline pieces: {kind: "text" | "code" | "strong" | "em", ...}

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(\S.*)$/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+(\S.*)$/;
const MAX_DEPTH = 6;

const indentOf = (line) => line.length - line.trimStart().length;
const isBlank = (line) => line.trim() === "";

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

export function parseBlocks(text, depth = 0) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [block, end] = depth < MAX_DEPTH ? parseBlock(lines, at, depth) : paragraph(lines, at, lines.length);
    block.source = lines.slice(at, end).join("\n");
    blocks.push(block);
    at = end;
  }
  return blocks;
}

/** The block that starts at line `at`, and the line after it. */
function parseBlock(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [{ kind: "heading", level: heading[1].length, text: heading[2].replace(/\s#+\s*$/, "") }, at + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (QUOTE.test(line)) return quote(lines, at, depth);
  if (ITEM.test(line)) return list(lines, at, depth);
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !startsBlock(lines[end])) end += 1;
  return paragraph(lines, at, end);
}

function paragraph(lines, at, end) {
  return [{ kind: "paragraph", text: lines.slice(at, end).join("\n").trim() }, end];
}

function code(lines, at, [, mark, language]) {
  const indent = indentOf(lines[at]);
  const content = [];
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const trimmed = lines[end].trim();
    const closes = trimmed.length >= mark.length && trimmed === mark[0].repeat(trimmed.length);
    if (closes && indentOf(lines[end]) <= indent + 3) {
      return [{ kind: "code", language, text: content.join("\n") }, end + 1];
    }
    content.push(lines[end].slice(Math.min(indent, indentOf(lines[end]))));
  }
  return [{ kind: "code", language, text: content.join("\n") }, end];
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [{ kind: "quote", blocks: parseBlocks(inner.join("\n"), depth + 1) }, end];
}

/** A list goes on over blank lines while what follows is indented into it or is one of its items. */
function list(lines, at, depth) {
  const [, space, marker] = ITEM.exec(lines[at]);
  const indent = space.length;
  const ordered = /\d/.test(marker);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const line = lines[end];
    const item = ITEM.exec(line);
    if (isBlank(line)) {
      let next = end + 1;
      while (next < lines.length && isBlank(lines[next])) next += 1;
      if (next === lines.length || !belongs(lines[next], indent, ordered)) break;
      items.at(-1).push("");
    } else if (item && item[1].length <= indent + 1) {
      if (item[1].length < indent || /\d/.test(item[2]) !== ordered || RULE.test(line)) break;
      items.push([item[3]]);
    } else if (indentOf(line) > indent || !startsBlock(line)) {
      const inset = indent + (ordered ? 3 : 2);
      items.at(-1).push(line.slice(Math.min(inset, indentOf(line))));
    } else {
      break;
    }
    end += 1;
  }
  const start = ordered ? Number.parseInt(marker, 10) : 1;
  return [{ kind: "list", ordered, start, items: items.map((it) => parseBlocks(it.join("\n"), depth + 1)) }, end];
}

function belongs(line, indent, ordered) {
  if (indentOf(line) > indent) return true;
  const item = ITEM.exec(line);
  return item !== null && item[1].length === indent && /\d/.test(item[2]) === ordered && !RULE.test(line);
}

const MARKS = [
  { mark: "**", kind: "strong", word: false },
  { mark: "__", kind: "strong", word: true },
  { mark: "*", kind: "em", word: false },
  { mark: "_", kind: "em", word: true },
];
const WORD = /[\p{L}\p{N}_]/u;

export function parseInline(text, depth = 0) {
  const pieces = [];
  const hopeless = new Set(); // marks with no closer in the rest of the text: looked for once, not again
  let plain = "";
  let at = 0;
  const push = (piece, end) => {
    if (plain) pieces.push({ kind: "text", text: plain });
    plain = "";
    pieces.push(piece);
    at = end;
  };
  while (at < text.length) {
    const char = text[at];
    if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else if (char === "`") {
      const ticks = /`+/y;
      ticks.lastIndex = at;
      const mark = ticks.exec(text)[0];
      const close = hopeless.has(mark) ? -1 : closingTicks(text, at + mark.length, mark.length);
      if (close < 0) {
        hopeless.add(mark);
        plain += mark;
        at += mark.length;
      } else {
        const content = text.slice(at + mark.length, close).replaceAll("\n", " ");
        push({ kind: "code", text: content.replace(/^ (.*\S.*) $/, "$1") }, close + mark.length);
      }
    } else if ((char === "*" || char === "_") && depth < MAX_DEPTH) {
      const { mark, kind, word } = MARKS.find((m) => text.startsWith(m.mark, at));
      const close = hopeless.has(mark) ? -1 : closingMark(text, at, mark, word);
      if (close === -1) hopeless.add(mark);
      if (close < 0) {
        plain += mark;
        at += mark.length;
      } else {
        push({ kind, pieces: parseInline(text.slice(at + mark.length, close), depth + 1) }, close + mark.length);
      }
    } else {
      plain += char;
      at += 1;
    }
  }
  if (plain) pieces.push({ kind: "text", text: plain });
  return pieces;
}

function closingTicks(text, from, length) {
  const run = /`+/g;
  run.lastIndex = from;
  for (let match = run.exec(text); match; match = run.exec(text)) {
    if (match[0].length === length) return match.index;
  }
  return -1;
}

/** Where emphasis opened at `at` closes; −1 when nothing ahead can close it, −2 when this mark opens nothing. */
function closingMark(text, at, mark, word) {
  const after = at + mark.length;
  if (/^\s?$/.test(text[after] ?? "") || (word && at > 0 && WORD.test(text[at - 1]))) return -2;
  for (let end = text.indexOf(mark, after + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    // A "*" that is half of a "**" closes no "*".
    if (mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark)) continue;
    const outside = text[end + mark.length] ?? "";
    if (/\s/.test(text[end - 1]) || (word && WORD.test(outside))) continue;
    return mark.length === 2 && outside === mark[0] ? end + 1 : end; // "***": the inner mark closes first
  }
  return -1;
}
