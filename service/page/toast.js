// A sentence that is shown for a while, with a way back where there is one.

const SHOWN_MS = 8000;

const byId = (id) => document.getElementById(id);

let timer = 0;

/** `undo` is null where nothing can be taken back. */
export function showToast(text, undo = null) {
  byId("toast-text").textContent = text;
  byId("toast-undo").hidden = undo === null;
  byId("toast-undo").onclick = () => {
    hideToast();
    undo();
  };
  byId("toast").hidden = false;
  clearTimeout(timer);
  timer = setTimeout(hideToast, SHOWN_MS);
}

export function hideToast() {
  clearTimeout(timer);
  byId("toast").hidden = true;
}
