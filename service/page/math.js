// Formulas by KaTeX, which is loaded with the first one.

import { element } from "./dom.js";

const FOLDER = "/static/vendor/katex-0.19.1";
const OPTIONS = { throwOnError: true, strict: "ignore", trust: false, maxSize: 50, maxExpand: 1000 };

let library = null;

async function load() {
  document.head.append(element("link", { rel: "stylesheet", href: `${FOLDER}/katex.min.css` }));
  await import("./vendor/katex-0.19.1/katex.min.js");
  return self.katex;
}

/** Sets the formula that the node has as its text. One that KaTeX does not understand stays as it is. */
export async function typeset(node) {
  const source = node.textContent;
  const displayMode = node.classList.contains("display");
  try {
    library ??= load();
    const tree = (await library).__renderToDomTree(source, { ...OPTIONS, displayMode });
    dropStyleAttributes(tree);
    node.replaceChildren(tree.toNode());
    if (displayMode) node.tabIndex = 0; // it may have to be scrolled
  } catch {
    node.classList.add("source");
  }
}

/** The page's policy forbids them; KaTeX sets all that matters by the style object, and the size of drawings doubly. */
function dropStyleAttributes(tree) {
  if (tree.attributes) delete tree.attributes.style;
  for (const child of tree.children ?? []) dropStyleAttributes(child);
}
