// The server's API key, which lives as long as the tab.

import { load, save } from "./storage.js";

const KEY = "quire.api-key";
const BLANK_ENDS = /^[\s\u200b-\u200d\u2060\ufeff]+|[\s\u200b-\u200d\u2060\ufeff]+$/g; // copied with it, often unseen
const FIT = /^[ -~]+$/; // a header carries no other characters

let unkept = ""; // the key, where the browser does not keep it

/** The key in a text that was given or kept; empty if there is none in it. */
export function keyIn(text) {
  const key = String(text).replace(BLANK_ENDS, "");
  return FIT.test(key) ? key : "";
}

export function keepKey(key) {
  unkept = save(KEY, key, "sessionStorage") === null ? "" : key;
}

/** The key of this tab; empty if it has none, or none that can be sent. */
export function keptKey() {
  return unkept || keyIn(load(KEY, "", "sessionStorage"));
}

/** Whether what the tab keeps can be no key. */
export function isKeptUnfit() {
  return load(KEY, "", "sessionStorage") !== "" && keptKey() === "";
}
