// A block of code with its language and a button to copy it, coloured by highlight.js.

import { copyButton, element } from "./dom.js";
import { sanitised } from "./sanitise.js";

const LONGEST = 100_000; // characters; longer code stays without colours
const REST = 10; // times as long as colouring took passes until code that grows is coloured again

const growers = new WeakMap(); // figure → function that takes its text

let library = null;

function highlighter() {
  library ??= import("./vendor/highlight.js-11.12.0/highlight.min.js").then((module) => module.default);
  return library;
}

export function codeBlock(language, text) {
  const code = element("code", {}, text);
  const copy = copyButton("Copy", () => code.textContent);
  const head = element("figcaption", {}, element("span", {}, language || "text"), copy);
  const figure = element("figure", { class: "code" }, head);
  figure.append(element("pre", { tabindex: "0", role: "group", "aria-label": `Code, ${language || "text"}` }, code));
  growers.set(figure, grower(code, language, text));
  return figure;
}

/** Shows the longer text of a block that still grows. */
export function growCode(figure, text) {
  growers.get(figure)(text);
}

/** What has come since the code was coloured stands behind it without colours until it is coloured again. */
function grower(code, language, first) {
  let text = first;
  let coloured = ""; // so much of it
  let waits = false;

  async function colour() {
    const highlight = await highlighter();
    waits = false;
    if (!highlight.getLanguage(language) || text.length > LONGEST) return;
    const began = performance.now();
    coloured = text;
    code.replaceChildren(sanitised(highlight.highlight(text, { language, ignoreIllegals: true }).value));
    const rest = (performance.now() - began) * REST;
    waits = true;
    setTimeout(() => {
      waits = false;
      if (text !== coloured) soon();
    }, rest);
  }

  function soon() {
    if (waits || language === "") return;
    waits = true;
    colour().catch(() => {}); // then it stays plain
  }

  soon();
  return (longer) => {
    if (longer === text) return;
    if (longer.startsWith(text)) {
      if (code.lastChild?.nodeType === Node.TEXT_NODE) code.lastChild.appendData(longer.slice(text.length));
      else code.append(longer.slice(text.length));
    } else {
      code.textContent = longer;
      coloured = "";
    }
    text = longer;
    soon();
  };
}
