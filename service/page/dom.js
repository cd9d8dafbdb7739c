// Building DOM nodes. Text goes in as text nodes only; nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

// Strokes on a 20 × 20 grid.
const ICONS = {
  copy: ["M7.5 7.5h8v8h-8z", "M4.5 12.5v-8h8"],
  check: ["M4.5 10.5l3.5 3.5 7.5-8"],
  retry: ["M15.5 10a5.5 5.5 0 1 1-1.7-4", "M15.8 3.2v3.3h-3.3"],
  bin: ["M4 5.5h12", "M7.5 5.5v-2h5v2", "M5.5 5.5l.7 11h7.6l.7-11"],
  edit: ["M4 16l.8-3.6L13 4.2l2.8 2.8-8.2 8.2z"],
  back: ["M12 5l-5 5 5 5"],
  on: ["M8 5l5 5-5 5"],
  clock: ["M10 3.5a6.5 6.5 0 1 0 0 13a6.5 6.5 0 1 0 0-13z", "M10 6.5v3.8l2.5 1.5"],
  alert: ["M10 6v5", "M10 13.9v.1", "M10 2.8a7.2 7.2 0 1 0 0 14.4a7.2 7.2 0 1 0 0-14.4z"],
};

/** An element. Properties starting with "on" are listeners, `class` is the class, the rest attributes. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 20 20");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  for (const d of ICONS[name]) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", d);
    svg.append(path);
  }
  return svg;
}

/** A small button that copies text() and says so for a moment. */
export function copyButton(label, text) {
  const caption = element("span", {}, label);
  const button = element("button", { type: "button", class: "quiet", onclick: copy }, icon("copy"), caption);
  let timer = 0;
  async function copy() {
    const copied = await copyText(text());
    caption.textContent = copied ? "Copied" : "Not copied";
    button.replaceChild(icon(copied ? "check" : "copy"), button.firstChild);
    clearTimeout(timer);
    timer = setTimeout(() => {
      caption.textContent = label;
      button.replaceChild(icon("copy"), button.firstChild);
    }, 1600);
  }
  return button;
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Plain http on another host has no clipboard API; copying a selection works there.
    const area = element("textarea", { class: "visually-hidden", readonly: true, "aria-hidden": "true" });
    const focused = document.activeElement;
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return copied;
  }
}
