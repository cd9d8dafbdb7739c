// The counts of the blocks, by one stream for all windows of the browser.

import { blockEvents } from "./blocks/updates.js";
import { followShared } from "./shared.js";

/** Calls changed(counts) for all that come, until `signal` is aborted. Throws an ApiError when there come no more. */
export function followCounts(signal, changed) {
  const read = async (tell) => {
    for await (const counts of blockEvents("detail=counts", signal)) tell(counts);
  };
  return followShared("quire.counts", signal, read, changed);
}
