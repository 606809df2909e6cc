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

/** The server of the page: a whole View of a run, then what is new, which the server holds back for about a second. */
export class ServerSource {
  constructor() {
    this.live = true;
  }

  /** Call `listener.onView`, `onDelta` and `onConnection` as data arrive. */
  start(listener) {
    // A second run is asked for only where there is one: a refused request is an error in the browser's console.
    this._follow("A", listener, (runs) => runs > 1 && this._follow("B", listener, () => {}));
  }

  async _follow(run, listener, onFirst) {
    let view = null;
    while (!view?.over) {
      const data = await this._news(run, view);
      if (data === null) {
        if (run === "A") listener.onConnection("lost");
        await new Promise((done) => { setTimeout(done, AGAIN_MS); });
        continue;
      }
      const first = view === null;
      // Whole: another job has begun in this workspace.
      const whole = first || data.whole;
      if (whole) view = new JobView(data);
      else view.merge(data);
      if (run === "A") listener.onConnection(view.over ? "recorded" : "live");
      if (whole) listener.onView(run, view);
      else listener.onDelta(run, view);
      if (first) onFirst(Number(data.runs ?? 1));
    }
  }

  async _news(run, view) {
    try {
      const answer = await fetch(`api/view?run=${run}${view === null ? "" : `&cursor=${view.cursor}`}`);
      return answer.ok ? await answer.json() : null;
    } catch {
      return null;
    }
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
