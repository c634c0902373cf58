// The dashboard: one JSON route, asked every five seconds while somebody looks, drawn as figures, charts and lists. Everything
// from the server becomes text nodes. Elements are made once and changed after that, so that the focus stays where it is.
"use strict";

const POLL_MS = 5000;
const SVG = "http://www.w3.org/2000/svg";
const GROUPS = {
  throughput: "Throughput", latency: "Latency", queue: "Queue and slots", memory: "Memory", reuse: "Prefixes and packs",
  draft: "Draft", roofline: "Roofline", errors: "Errors",
};
const CHARTS = [
  { group: "throughput", title: "Tokens written", columns: ["written"] },
  { group: "reuse", title: "Prompt tokens", columns: ["read", "reused"] },
  { group: "latency", title: "Time to the first token", columns: ["first_p50", "first_p95"], worst: true },
  { group: "latency", title: "Time to the next token", columns: ["next_p50", "next_p95"], worst: true },
  { group: "queue", title: "Requests", columns: ["running", "waiting"] },
  { group: "memory", title: "KV cache", columns: ["kv_used", "kv_kept"], most: "kv_total" },
  { group: "draft", title: "Proposals accepted", columns: ["accepted"], most: 1 },
  { group: "roofline", title: "Share of the memory's rate", columns: ["bandwidth"], most: 1 },
  { group: "errors", title: "Requests refused", columns: ["errors"] },
];
const TILES = ["written_per_s", "first_token_p95", "next_token_p95", "running", "waiting", "kv_share", "saved", "errors"];

const number = (n, digits = 0) => n.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

// A value and its unit, apart: the unit is written smaller.
function words(value, unit) {
  if (value === null || value === undefined) return ["–", ""];
  const size = Math.abs(value);
  if (unit === "share") return [number(100 * value, size > 0 && size < 0.1 ? 1 : 0), "%"];
  if (unit === "s") {
    if (size === 0) return ["0", "s"];
    if (size < 0.01) return [number(1000 * value, 1), "ms"];
    if (size < 1) return [number(1000 * value), "ms"];
    if (size < 120) return [number(value, size < 10 ? 1 : 0), "s"];
    return size < 7200 ? [number(value / 60), "min"] : [number(value / 3600, 1), "h"];
  }
  if (unit === "bytes/s") return [number(value / 1e9, size < 1e10 ? 1 : 0), "GB/s"];
  if (unit === "bytes") {
    if (size === 0) return ["0", "bytes"];
    const [name, step] = size >= 2 ** 30 ? ["GiB", 2 ** 30] : size >= 2 ** 20 ? ["MiB", 2 ** 20] : ["KiB", 2 ** 10];
    return [number(value / step, size / step < 10 ? 1 : 0), name];
  }
  // What else is counted is in the label.
  const amount = number(value, unit === "tokens/s" && size > 0 && size < 10 ? 1 : Number.isInteger(value) || size >= 10 ? 0 : 2);
  return [amount, unit.startsWith("tokens") ? unit : ""];
}
const said = (value, unit) => words(value, unit).filter(Boolean).join(" ");
const mark = (word) => make("span", `mark ${word}`, word);
const draw = (tag, attributes, className) => {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (className) node.setAttribute("class", className);
  return node;
};
const ago = (s) => (s < 60 ? `${s} s ago` : s < 7200 ? `${Math.round(s / 60)} min ago` : `${Math.round(s / 3600)} h ago`);

// The past hour: rows by column, and the number of the newest.
const past = { started: null, newest: 0, interval: 10, length: 360, columns: [], rows: [] };
let minutes = 60;
let figures = {};

function remember(report) {
  const { history, server } = report;
  if (past.started !== server.started || history.first > past.newest + 1) past.rows = [];
  past.started = server.started;
  past.interval = history.interval_s;
  past.length = history.length;
  past.columns = history.columns;
  past.newest = history.newest;
  past.rows = [...past.rows, ...history.rows].slice(-history.length);
}

const shownRows = () => past.rows.slice(-Math.round((60 * minutes) / past.interval));

// A round number not below `n`, so that half of it is one too.
function ceiling(n) {
  if (!(n > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(n));
  return power * [1, 2, 4, 6, 8, 10].find((step) => step * power >= n * 0.9999);
}
function roof(n, unit) {
  if (unit === "bytes") return n > 0 ? 2 ** Math.ceil(Math.log2(n)) : 1;
  if (unit === "requests") return Math.max(2, 2 * Math.ceil(ceiling(n) / 2));
  return ceiling(n);
}

class Chart {
  constructor(plan, container) {
    Object.assign(this, plan, { cursor: null });
    const node = make("div", "chart");
    const head = make("div", "head");
    this.marks = make("span");
    head.append(make("h3", "", plan.title), this.marks);
    this.legend = make("ul", "legend");
    this.plot = make("div", "plot");
    this.plot.tabIndex = 0;
    this.plot.setAttribute("role", "slider");
    this.plot.setAttribute("aria-label", `${plan.title}, over time`);
    this.svg = draw("svg", { "aria-hidden": "true" });
    this.plot.append(this.svg);
    this.readout = make("div", "readout");
    this.table = make("details");
    this.table.append(make("summary", "", "As a table"));
    this.scroll = make("div", "scroll");
    this.scroll.tabIndex = 0;
    this.scroll.setAttribute("role", "region");
    this.scroll.setAttribute("aria-label", `${plan.title}, as a table`);
    this.table.append(this.scroll);
    this.table.addEventListener("toggle", () => this.fillTable());
    node.append(head, this.legend, this.plot, this.readout, this.table);
    container.append(node);
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerdown", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.leave());
    this.plot.addEventListener("blur", () => this.leave());
    new ResizeObserver(() => this.update()).observe(this.plot);
  }

  leave() {
    this.cursor = null;
    this.update();
  }

  key(event) {
    const last = this.slots - 1;
    const at = this.cursor ?? last;
    const step = event.shiftKey ? 6 : 1;
    const to = { ArrowLeft: at - step, ArrowDown: at - step, ArrowRight: at + step, ArrowUp: at + step, PageDown: at - 30,
      PageUp: at + 30, Home: this.slots - this.rows.length, End: last }[event.key];
    if (event.key === "Escape") this.leave();
    if (to === undefined || !this.rows.length) return;
    event.preventDefault();
    this.cursor = Math.min(last, Math.max(this.slots - this.rows.length, to));
    this.update();
  }

  point(event) {
    if (!this.rows?.length) return;
    const { left, width } = this.plot.getBoundingClientRect();
    const at = Math.round(((event.clientX - left) / width) * (this.slots - 1));
    this.cursor = Math.min(this.slots - 1, Math.max(this.slots - this.rows.length, at));
    this.update();
  }

  // What the rows say: values of each of this chart's columns.
  update() {
    const places = this.columns.map((id) => past.columns.findIndex((column) => column.id === id));
    this.facts = places.map((place) => past.columns[place]);
    if (!this.facts.length || this.facts.includes(undefined)) return;
    const rows = shownRows();
    this.rows = rows.map((row) => places.map((place) => row[place]));
    this.slots = Math.round((60 * minutes) / past.interval);
    const unit = this.facts[0].unit;
    const known = this.rows.flat().filter((value) => value !== null);
    const fixed = typeof this.most === "string" ? figures[this.most]?.value : this.most;
    this.top = fixed || roof(Math.max(0, ...known), unit);
    this.drawAll(unit);
    this.say(unit);
    if (this.table.open) this.fillTable();
  }

  drawAll(unit) {
    const width = Math.max(200, this.plot.clientWidth);
    const [height, floor, head] = [128, 110, 8];
    const x = (slot) => 1 + ((width - 2) * slot) / Math.max(1, this.slots - 1);
    const y = (value) => floor - ((floor - head) * Math.min(value, this.top)) / this.top;
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      parts.push(draw("line", { x1: 0, x2: width, y1: y(share * this.top), y2: y(share * this.top) }, "grid"));
    }
    const first = this.slots - this.rows.length;
    this.facts.forEach((_, series) => {
      const runs = [];
      this.rows.forEach((row, at) => {
        const value = row[series];
        if (value === null) runs.push([]);
        else {
          if (!runs.length) runs.push([]);
          runs[runs.length - 1].push([x(first + at), y(value)]);
        }
      });
      for (const run of runs.filter((run) => run.length)) {
        const path = run.map(([px, py]) => `${px.toFixed(1)},${py.toFixed(1)}`).join("L");
        if (run.length === 1) {
          parts.push(draw("circle", { cx: run[0][0], cy: run[0][1], r: 2.2 }, `dot s${series + 1}`));
          continue;
        }
        if (series === 0) parts.push(draw("path", { d: `M${run[0][0]},${floor}L${path}L${run[run.length - 1][0]},${floor}Z` }, "area"));
        parts.push(draw("path", { d: `M${path}` }, `line s${series + 1}`));
      }
    });
    for (const share of [0.5, 1]) {
      const label = draw("text", { x: 2, y: y(share * this.top) + (share === 1 ? 11 : -3) });
      label.textContent = said(share * this.top, unit);
      parts.push(label);
    }
    for (const [at, anchor, text] of [[0, "start", `${minutes} min ago`], [0.5, "middle", `${minutes / 2} min`], [1, "end", "now"]]) {
      const label = draw("text", { x: at * width, y: height - 4, "text-anchor": anchor });
      label.textContent = text;
      parts.push(label);
    }
    if (this.cursor !== null) {
      parts.push(draw("line", { x1: x(this.cursor), x2: x(this.cursor), y1: head, y2: floor }, "cursor"));
      this.rows[this.cursor - first]?.forEach((value, series) => {
        if (value !== null) parts.push(draw("circle", { cx: x(this.cursor), cy: y(value), r: 3.5 }, `dot s${series + 1}`));
      });
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...parts);
  }

  // The legend, the mark, and what stands under the cursor, for eyes and for screen readers.
  say(unit) {
    const first = this.slots - this.rows.length;
    const row = this.rows[(this.cursor ?? this.slots - 1) - first];
    const values = this.facts.map((fact, series) => `${fact.label} ${said(row?.[series] ?? null, unit)}`);
    const back = (this.slots - 1 - (this.cursor ?? this.slots - 1)) * past.interval;
    const when = back === 0 ? "last 10 s" : ago(back);
    this.readout.textContent = row && this.cursor !== null ? `${when}: ${values.join(", ")}` : "";
    const slider = { valuemin: first, valuemax: this.slots - 1, valuenow: this.cursor ?? this.slots - 1 };
    for (const [name, value] of Object.entries(slider)) this.plot.setAttribute(`aria-${name}`, value);
    this.plot.setAttribute("aria-valuetext", row ? `${when}: ${values.join(", ")}` : "nothing yet");
    this.marks.replaceChildren(mark(this.facts[0].mark));
    this.legend.replaceChildren(...this.facts.map((fact, series) => {
      const item = make("li");
      const swatch = draw("svg", { viewBox: "0 0 20 8", "aria-hidden": "true" });
      swatch.append(draw("path", { d: "M1,4L19,4" }, `line s${series + 1}`));
      item.append(swatch, document.createTextNode(`${fact.label} ${said(this.rows[this.rows.length - 1]?.[series] ?? null, unit)}`));
      return item;
    }));
  }

  // A row for each minute: the mean, of times the longest.
  fillTable() {
    if (!this.table.open || !this.rows) return;
    const each = Math.round(60 / past.interval);
    const table = make("table");
    const head = make("tr");
    head.append(...["When", ...this.facts.map((fact) => fact.label)].map((text) => {
      const cell = make("th", "", text);
      cell.scope = "col";
      return cell;
    }));
    const body = make("tbody");
    for (let end = this.rows.length; end > 0; end -= each) {
      const part = this.rows.slice(Math.max(0, end - each), end);
      const line = make("tr");
      const name = make("th", "", end === this.rows.length ? "last minute" : ago((this.rows.length - end) * past.interval));
      name.scope = "row";
      line.append(name);
      this.facts.forEach((fact, series) => {
        const known = part.map((row) => row[series]).filter((value) => value !== null);
        const mean = () => known.reduce((sum, value) => sum + value, 0) / known.length;
        line.append(make("td", "", said(!known.length ? null : this.worst ? Math.max(...known) : mean(), fact.unit)));
      });
      body.append(line);
    }
    const top = make("thead");
    top.append(head);
    table.append(make("caption", "quiet", this.worst ? "The longest of each minute" : "The mean of each minute"), top, body);
    this.scroll.replaceChildren(table);
  }
}

// What is made once: cards by group with their charts, rows of figures and places for lists.
const made = { charts: [], figures: {}, tiles: {}, lists: {}, cards: {} };

function build(report) {
  for (const [group, title] of Object.entries(GROUPS)) {
    const card = make("section", "card");
    card.append(make("h2", "", title));
    const head = card.firstChild;
    head.id = `group-${group}`;
    card.setAttribute("aria-labelledby", head.id);
    for (const plan of CHARTS.filter((plan) => plan.group === group)) made.charts.push(new Chart(plan, card));
    const rows = make("dl", "rows");
    for (const figure of report.figures.filter((figure) => figure.group === group)) {
      const row = make("div");
      const name = make("dt", "", figure.label);
      if (figure.over !== "now") name.append(make("small", "", figure.over === "start" ? "since start" : figure.over));
      const value = make("dd", "value", "–");
      value.dataset.figure = figure.id;
      const source = make("dd");
      source.append(mark(figure.mark));
      row.append(name, value, source);
      rows.append(row);
      made.figures[figure.id] = value;
    }
    card.append(rows);
    made.lists[group] = make("div");
    card.append(made.lists[group]);
    $("cards").append(card);
    made.cards[group] = card;
  }
  made.lists.nodes = make("section", "card");
  made.lists.nodes.id = "nodes";
  $("cards").append(made.lists.nodes);
  for (const id of TILES) {
    const figure = report.figures.find((figure) => figure.id === id);
    if (!figure) continue;
    const tile = make("div");
    const value = make("dd", "big");
    const source = make("dd", "source");
    source.append(make("span", "", figure.over), mark(figure.mark));
    tile.append(make("dt", "", figure.label), value, source);
    $("tiles").append(tile);
    made.tiles[id] = value;
  }
  $("sentences").append(...report.figures.flatMap((figure) => {
    const name = make("dt", "", `${figure.label}, ${figure.over} `);
    name.append(mark(figure.mark));
    return [name, make("dd", "", figure.what)];
  }));
}

const caption = (title, word) => {
  const node = make("div", "caption");
  node.append(make("h3", "", title), mark(word));
  return node;
};

function bar(shares) {
  const node = make("div", "bar");
  for (const [share, className] of shares) {
    const fill = make("i", className);
    fill.style.width = `${Math.min(100, 100 * share)}%`;
    node.append(fill);
  }
  return node;
}

function meter(name, shares, text) {
  const item = make("li", "meter");
  item.append(make("span", "", name), bar(shares), make("span", "quiet", text));
  return item;
}

function showSlots({ mark: word, list }, context) {
  const items = make("ul", "list");
  for (const slot of list) {
    const held = slot.processed_tokens + slot.generated_tokens;
    const busy = slot.state !== "idle";
    const cached = Math.min(slot.cached_tokens, held);
    const text = held ? `${number(held)} tokens${cached ? `, ${number(cached)} reused` : ""}` : "";
    items.append(meter(`${slot.id} ${slot.state}`, busy ? [[cached / context, "kept"], [(held - cached) / context, ""]] : [], text));
  }
  made.lists.queue.replaceChildren(caption("Slots", word), items);
}

function showErrors({ mark: word, list }) {
  const parts = [caption("By code", word)];
  if (list.length) {
    const table = make("table");
    const head = make("tr");
    const names = ["Status", "Code", "1 h", "Start", "Last"];
    head.append(...names.map((name, at) => {
      const cell = make("th", at === 1 ? "code" : "", name);
      cell.scope = "col";
      return cell;
    }));
    const body = make("tbody");
    for (const error of list) {
      const row = make("tr");
      const cells = [error.status, error.code, number(error.last_hour), number(error.total), ago(error.seconds_ago)];
      row.append(...cells.map((text, at) => make("td", at === 1 ? "code" : "", text)));
      body.append(row);
    }
    const top = make("thead");
    top.append(head);
    table.append(top, body);
    parts.push(table);
  } else parts.push(make("p", "none", "None since the start"));
  made.lists.errors.replaceChildren(...parts);
}

function showDraft({ mark: word, list }) {
  made.cards.draft.hidden = !list.length;
  const items = make("ul", "list");
  for (const { place, accepted_share: share } of list) items.append(meter(`place ${place}`, [[share, ""]], said(share, "share")));
  made.lists.draft.replaceChildren(caption("Accepted by place, since start", word), items);
}

function showNodes({ mark: word, list }) {
  made.lists.nodes.hidden = !list.length;
  const items = make("dl", "rows");
  for (const node of list) {
    const row = make("div");
    const facts = [node.reads_for_us ? "reads for us" : "asks us"];
    if (node.round_trip_s !== null) facts.push(said(node.round_trip_s, "s"));
    if (node.bytes_per_s !== null) facts.push(said(node.bytes_per_s, "bytes/s"));
    if (node.fetching || node.giving) facts.push(`${node.fetching} in, ${node.giving} out`);
    const name = make("dt", "", node.name);
    name.append(make("div", "quiet", [...facts, node.fault].filter(Boolean).join(" · ")));
    const source = make("dd");
    source.append(mark(word));
    row.append(name, make("dd", "", node.connected ? "connected" : "away"), source);
    items.append(row);
  }
  made.lists.nodes.replaceChildren(make("h2", "", "Nodes"), items);
}

function show(report) {
  remember(report);
  figures = Object.fromEntries(report.figures.map((figure) => [figure.id, figure]));
  if (!$("cards").firstChild) build(report);
  for (const [id, node] of Object.entries(made.figures)) node.textContent = figures[id] ? said(figures[id].value, figures[id].unit) : "–";
  for (const [id, node] of Object.entries(made.tiles)) {
    const [amount, unit] = words(figures[id].value, figures[id].unit);
    const beside = id === "running" ? `of ${figures.slots?.value ?? "?"}` : unit;
    node.replaceChildren(document.createTextNode(amount), make("small", "", beside && ` ${beside}`));
    node.classList.toggle("bad", id === "errors" && figures.own_errors?.value > 0);
  }
  const { server, model } = report;
  setState(server.state, server.reason);
  $("model").textContent = `${model.name} · ${number(model.context_tokens)} tokens`;
  $("device").textContent = server.device;
  $("device").title = server.device;
  showSlots(report.slots, model.context_tokens);
  showErrors(report.errors);
  showDraft(report.draft);
  showNodes(report.nodes);
  made.charts.forEach((chart) => chart.update());
}

function setState(word, notice) {
  $("state").textContent = word;
  $("state").className = `chip ${word}`;
  document.body.classList.toggle("away", word === "away");
  $("notice").hidden = !notice;
  if (notice && $("notice").textContent !== notice) $("notice").textContent = notice;
}

async function look() {
  try {
    const response = await call(`v1/dashboard?since=${past.rows.length ? past.newest : 0}`);
    if (response.ok) show(await response.json());
    else if (response.status === 503) setState("loading", "The model is being loaded.");
    else setState("away", `The server answers with ${response.status}; trying again.`);
  } catch {
    setState("away", "No connection to the server; trying again. What is shown is the last that was known.");
  }
}

let next = 0;
async function watch() {
  clearTimeout(next);
  if (!document.hidden) await look();
  clearTimeout(next);
  next = setTimeout(watch, POLL_MS);
}

for (const button of $("spans").querySelectorAll("button")) {
  button.addEventListener("click", () => {
    minutes = Number(button.dataset.minutes);
    for (const other of $("spans").querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
    made.charts.forEach((chart) => {
      chart.cursor = null;
      chart.update();
    });
  });
}
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) watch();
});
watch();
