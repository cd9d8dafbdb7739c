// What a stream of the server's tells, by one window for all of the browser: it has few connections for each server.

/**
 * Calls changed(data) for all that comes, until `signal`, if there is one, is aborted. read(tell) reads the stream and
 * tells of what comes, once this window is the one that reads; what it returns, or throws, is the end. `name` is that of
 * the lock of who reads, and of the channel by which the others hear it.
 */
export async function followShared(name, signal, read, changed) {
  if (!navigator.locks) return read(changed); // a page of plain http on another host
  const channel = new BroadcastChannel(name);
  let last = null; // of what this window reads
  channel.onmessage = ({ data }) => {
    if (data !== null) changed(data);
    else if (last !== null) channel.postMessage(last);
  };
  channel.postMessage(null); // asks for what came last
  const tell = (data) => {
    last = data;
    channel.postMessage(data);
    changed(data);
  };
  try {
    return await navigator.locks.request(name, signal ? { signal } : {}, () => read(tell));
  } finally {
    channel.close();
  }
}
