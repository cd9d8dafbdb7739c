// A sentence that is shown for a while, with a way back where there is one, or for as long as it holds.

const SHOWN_MS = 8000;

const byId = (id) => document.getElementById(id);

let timer = 0; // of what is shown for a while
let notice = ""; // what holds

/** `undo` is null where nothing can be taken back. */
export function showToast(text, undo = null) {
  show(text, undo);
  clearTimeout(timer);
  timer = setTimeout(hideToast, SHOWN_MS);
}

export function hideToast() {
  clearTimeout(timer);
  timer = 0;
  show(notice);
}

/** Shows what holds from now on, whenever nothing else is shown. Empty: nothing does. */
export function showNotice(text) {
  if (text === notice) return;
  notice = text;
  if (timer === 0) show(notice);
}

function show(text, undo = null) {
  byId("toast-text").textContent = text;
  byId("toast-undo").hidden = undo === null;
  byId("toast-undo").onclick = () => {
    hideToast();
    undo();
  };
  byId("toast").hidden = text === "";
}
