// Where the page's data come from: the server of a running or recorded job, or the file itself.

import { JobView } from "./job_view.js";

const AGAIN_MS = 2000;

/** Data that are written into the page, or null. */
function embedded(id) {
  const holder = document.getElementById(id);
  return holder && JSON.parse(holder.textContent);
}

/** A View that is written into the page: a recorded job that needs no server. */
export class EmbeddedSource {
  constructor() {
    this.live = false;
    this._logs = embedded("logs") ?? {};
  }

  /** Call `listener.onView(run, JobView)` once for each run. */
  start(listener) {
    for (const [run, id] of [["A", "view"], ["B", "view-b"]]) {
      const view = embedded(id);
      if (view) listener.onView(run, new JobView(view));
    }
    listener.onConnection("recorded");
  }

  /** The last lines of a process's log, if they were written into the page, or null. */
  async log(process) {
    return this._logs[process] ?? null;
  }
}

/** The server of the page: one View, then deltas, over server-sent events. */
export class ServerSource {
  constructor() {
    this.live = true;
    this._streams = [];
  }

  /** Call `listener.onView`, `onDelta` and `onConnection` as data arrive. */
  start(listener) {
    this._follow("A", "api/events", listener, () => {
      // Asked for only where there is one: a refused request is an error in the browser's console.
      if (this._hasSecond) this._follow("B", "api/events?run=B", listener, () => {});
    });
  }

  _follow(run, address, listener, then) {
    let view = null;
    const stream = new EventSource(address);
    this._streams.push(stream);
    const finish = () => {
      // An ended job sends nothing more, and a browser would ask again for ever.
      if (!view?.over) return;
      stream.close();
      if (run === "A") listener.onConnection("recorded");
    };
    stream.addEventListener("view", (message) => {
      const first = view === null;
      const data = JSON.parse(message.data);
      view = new JobView(data);
      if (run === "A") {
        this._hasSecond = Number(data.runs ?? 1) > 1;
        listener.onConnection("live");
      }
      listener.onView(run, view);
      if (first) then();
      finish();
    });
    stream.addEventListener("delta", (message) => {
      const data = JSON.parse(message.data);
      if (data.whole) {
        // Another job has begun in this workspace.
        view = new JobView(data);
        listener.onView(run, view);
      } else {
        view.merge(data);
        listener.onDelta(run, view);
      }
      finish();
    });
    stream.addEventListener("error", () => {
      if (run === "A" && !view?.over) listener.onConnection("lost");
      // A refusal closes the stream, and the browser would not try again.
      if (stream.readyState === EventSource.CLOSED && !view?.over) {
        setTimeout(() => this._follow(run, address, listener, () => {}), AGAIN_MS);
      }
    });
  }

  /** The last lines of a process's log, or null. */
  async log(process) {
    const answer = await fetch(`api/log?process=${encodeURIComponent(process)}`);
    return answer.ok ? answer.text() : null;
  }
}

/** The source that index.html names. */
export function dataSource() {
  return document.documentElement.dataset.source === "embedded" ? new EmbeddedSource() : new ServerSource();
}
