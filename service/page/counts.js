// The counts of the blocks, by one stream for all windows of the browser: it has few connections for each server.

import { blockEvents } from "./blocks/updates.js";

const NAME = "quire.counts"; // of the lock of who reads them, and of the channel by which the others hear them

/** Calls changed(counts) for all that come, until `signal` is aborted. Throws an ApiError when there come no more. */
export async function followCounts(signal, changed) {
  if (!navigator.locks) return read(signal, changed); // a page of plain http on another host
  const channel = new BroadcastChannel(NAME);
  let last = null; // of those that this window reads
  channel.onmessage = ({ data }) => {
    if (data !== null) changed(data);
    else if (last !== null) channel.postMessage(last);
  };
  channel.postMessage(null); // asks for the last ones
  const tell = (counts) => {
    last = counts;
    channel.postMessage(counts);
    changed(counts);
  };
  try {
    return await navigator.locks.request(NAME, { signal }, () => read(signal, tell));
  } finally {
    channel.close();
  }
}

async function read(signal, changed) {
  for await (const counts of blockEvents("detail=counts", signal)) changed(counts);
}
