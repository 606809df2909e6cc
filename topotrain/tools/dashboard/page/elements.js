// Elements of the page, and figures as text. All strings become text nodes, never markup.

/** Return the element of index.html that has this id. */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`no element ${id}`);
  return found;
}

/** Make an element; `attributes` may hold `class`, `text` and any attribute. */
export function make(tag, attributes = {}, children = []) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") made.textContent = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** Make an element of SVG. */
export function makeSvg(tag, attributes = {}, children = []) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}

/** Set an element's text, without touching the document when it is the same. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set an attribute, or remove it for null. */
export function setAttribute(element, name, value) {
  if (value === null) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== value) {
    element.setAttribute(name, value);
  }
}

/** Fill a definition list with pairs of a name and a text; reuses what is there. */
export function fillFigures(list, pairs) {
  while (list.children.length > pairs.length) list.lastElementChild.remove();
  pairs.forEach(([name, value], index) => {
    const entry = list.children[index] ?? list.appendChild(make("div", {}, [make("dt"), make("dd")]));
    setText(entry.firstElementChild, name);
    setText(entry.lastElementChild, value);
  });
}

/** Seconds as m:ss or h:mm:ss. */
export function clockText(seconds) {
  // A sum of tenths may be a little less than the second that it means.
  const whole = Math.max(0, Math.floor(seconds + 1e-6));
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  const two = (n) => String(n).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

/** Seconds in words, as a screen reader says them. */
export function spokenTime(seconds) {
  const whole = Math.max(0, Math.floor(seconds + 1e-6));
  const parts = [[Math.floor(whole / 3600), "h"], [Math.floor(whole / 60) % 60, "min"], [whole % 60, "s"]];
  const said = parts.filter(([n], index) => n > 0 || index === 2);
  return said.map(([n, unit]) => `${n} ${unit}`).join(" ");
}

/** A number with about three digits that count. */
export function numberText(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e7)) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

/** Bytes with a decimal prefix. */
export function bytesText(value, suffix = "B") {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  let rest = Math.abs(value);
  for (const prefix of ["", "k", "M", "G", "T"]) {
    if (rest < 1000 || prefix === "T") return `${Number(rest.toPrecision(3))} ${prefix}${suffix}`;
    rest /= 1000;
  }
  return "–";
}

/** A value of a metric as text with its unit. */
export function metricText(metric, value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (metric === "bytes_per_s") return bytesText(value, "B/s");
  if (metric === "memory_bytes") return bytesText(value);
  if (metric === "waiting_share") return `${Math.round(value * 100)} %`;
  return numberText(value);
}

const PALETTE = ["ink", "muted", "line", "surface", "accent", "flow", "idle", "bad", "good", "notable",
  "line-0", "line-1", "line-2", "line-3", "line-4", "line-5"];

/** The colours of the style sheet, for what is drawn on a canvas. */
export function readPalette() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(PALETTE.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

/** Give a canvas the size of its box in device pixels; returns its context, scaled to CSS pixels, cleared. */
export function clearedContext(canvas, width, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
