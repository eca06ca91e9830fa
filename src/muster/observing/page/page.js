// The page of `muster watch`. Everything from the file of the run is shown as text (textContent), never as HTML.
"use strict";

const RUNNING_S = 10; // a run without news for longer is lost
const LANE_S = 60;
const FIRST_KINDS = 3, MOST_KINDS = 20; // of errors: above the charts, and in all
const WINDOW = 100; // episodes of a running mean; episodes/curve.py computes the same
const PARTS = [["env", "green"], ["policy", "blue"], ["copy", "orange"], ["rest", "grey"]];
const PHASES = { // letters of observing/watching.py: name, colour
  "s": ["step", "--green"], "p": ["policy", "--blue"], "r": ["reset", "--orange"], "w": ["weights", "--pink"],
  "-": ["wait", "--sky"], "c": ["construct", "--pink"], "j": ["join", "--pink"], "q": ["call", "--pink"],
  "x": ["close", "--grey"], "D": ["dead", "--red"], "X": ["dropped", "--red"],
};
const SHOWN = [["step", "--green"], ["policy", "--blue"], ["reset", "--orange"], ["wait", "--sky"],
  ["construct, weights, calls", "--pink"], ["dead", "--red"]];

let goodbye = null; // the last event of the server
const opened = new Set(["end"]); // keys of errors whose texts are shown
let listed = ""; // what the list of errors shows
let run = {}, end = null, snapshots = [], errors = new Map(), now = 0, paused = false, dirty = true;
let episodes = new Map(), filming = ""; // by name: newest, best, worst; the one of which a film is being made
const lanes = new Map(); // worker: [[time, letters], ...] of the last minute
const charts = new Map();

const $ = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const element = (tag, text, className) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
};

function short(n) {
  if (n === null || n === undefined || !Number.isFinite(n)) return "–";
  for (const [size, unit] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(n) >= size) return (n / size).toFixed(1).replace(/\.0$/, "") + unit;
  }
  return Math.abs(n) >= 100 || Number.isInteger(n) ? n.toFixed(0) : n.toPrecision(3).replace(/\.?0+$/, "");
}
const counted = (n, noun) => `${whole(n)} ${noun}${n === 1 ? "" : "s"}`;
const whole = (n) => (Number.isFinite(n) ? Math.round(n).toLocaleString("en-US") : "–");
const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(0)} %` : "–");
function clock(seconds) {
  const s = Math.max(0, Math.round(seconds)), h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  const two = (n) => String(n).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
}

// --- what the server sends ---------------------------------------------------------------------------------

function forget() {
  run = {}; end = null; snapshots = []; errors = new Map(); episodes = new Map(); lanes.clear();
}

function take(entry) {
  if (entry.kind === "run") run = entry;
  else if (entry.kind === "end") end = entry;
  else if (entry.kind === "error") errors.set(entry.id, entry);
  else if (entry.kind === "episode") episodes.set(entry.which, entry);
  else {
    snapshots.push(entry);
    for (const worker of entry.workers) {
      if (!lanes.has(worker.index)) lanes.set(worker.index, []);
      lanes.get(worker.index).push([entry.time, worker.lane]);
    }
  }
  dirty = true;
}

function listen() {
  const source = new EventSource("events");
  source.addEventListener("restart", forget);
  source.addEventListener("entries", (event) => JSON.parse(event.data).forEach(take));
  source.addEventListener("clock", (event) => { now = JSON.parse(event.data); show(); });
  source.addEventListener("goodbye", (event) => {
    source.close(); // otherwise the browser would try to connect again
    goodbye = JSON.parse(event.data);
    $("over").hidden = false;
    $("over").querySelector("code").textContent = `muster watch ${goodbye.run}`;
    dirty = true;
    show();
  });
  source.onerror = () => setState("unknown", "no connection to muster watch");
}

// --- numbers -----------------------------------------------------------------------------------------------

// As `running_means` of episodes/curve.py: frames, mean, half width of its 95 % interval.
function runningMeans(what) {
  const zero = { episodes: 0, judged: 0, return_sum: 0, return_squares: 0, length_sum: 0, length_squares: 0, success_sum: 0 };
  const points = [[0, zero]];
  for (const s of snapshots) if (!Object.values(s.totals).includes(null)) points.push([s.frames, s.totals]);
  const count = (i) => (what === "success" ? points[i][1].judged : points[i][1].episodes);
  const columns = [[], [], [], []];
  let first = 0, newest = 0;
  for (let i = 1; i < points.length; i++) {
    if (count(i) === newest) continue;
    newest = count(i);
    while (newest - count(first + 1) >= WINDOW) first++;
    const t = points[i][1], since = points[first][1], n = newest - count(first);
    const squares = what === "success" ? "success_sum" : `${what}_squares`;
    const mean = (t[`${what}_sum`] - since[`${what}_sum`]) / n;
    const half = 1.96 * Math.sqrt(Math.max(0, (t[squares] - since[squares]) / n - mean * mean) / n);
    const shifted = mean + (what === "return" ? t.origin : 0);
    columns[0].push(points[i][0]); columns[1].push(shifted);
    columns[2].push(shifted - half); columns[3].push(shifted + half);
  }
  return columns;
}

function rates() {
  const columns = [[], []], least = (Number(run.every_s) || 1) / 2; // the last snapshot follows the one before at once
  let before = snapshots[0];
  for (const s of snapshots) {
    if (s.time - before.time < least) continue;
    columns[0].push(s.time - snapshots[0].time);
    columns[1].push(Math.max(0, s.frames - before.frames) / (s.time - before.time));
    before = s;
  }
  return columns;
}

function newestMean(what, otherwise) { // the last value of the curve
  const means = runningMeans(what)[1];
  return means.length ? means[means.length - 1] : otherwise;
}

function recent(seconds) { // the first snapshot of the last seconds
  const newest = snapshots[snapshots.length - 1];
  return snapshots.find((s) => newest.time - s.time <= seconds);
}

// --- drawing -----------------------------------------------------------------------------------------------

function chart(id, columns, label, text) {
  const box = $(id);
  if (!columns[0].length) {
    if (!charts.has(id)) box.replaceChildren(element("div", text, "empty"));
    return;
  }
  const last = columns[1][columns[1].length - 1];
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", `${label}: newest value ${short(last)}`);
  box.dataset.value = last;
  if (charts.has(id)) { charts.get(id).setData(columns); return; }
  const axis = (values) => ({ stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 },
    ticks: { stroke: colour("--line"), width: 1 }, font: "11px system-ui", values, size: 44 });
  const ticks = (_, found) => found.map(short);
  const seconds = (_, found) => found.map((s) => clock(s));
  const line = { stroke: colour("--blue"), width: 2, points: { show: columns[0].length < 3 } };
  const edge = { stroke: "transparent", width: 0, points: { show: false } };
  const banded = columns.length === 4;
  box.replaceChildren();
  charts.set(id, new uPlot({
    width: box.clientWidth, height: box.clientHeight, legend: { show: false }, cursor: { show: false },
    scales: { x: { time: false }, y: banded ? {} : { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    axes: [{ ...axis(banded ? ticks : seconds), size: 28 }, axis(ticks)],
    series: [{}, line, ...(banded ? [edge, edge] : [])],
    bands: banded ? [{ series: [3, 2], fill: colour("--band") }] : [],
  }, columns, box));
}

function bars(id, rows, most) { // rows: name, number, colour, text
  const made = rows.map(([name, number, className, text]) => {
    const row = element("div", undefined, "bar"), track = element("div", undefined, "track");
    const fill = element("div", undefined, className);
    fill.style.width = `${most > 0 ? Math.min(100, (100 * number) / most) : 0}%`;
    track.append(fill);
    row.append(element("span", name), track, element("span", text));
    return row;
  });
  $(id).replaceChildren(...made);
}

function setState(state, text) {
  $("state").dataset.state = state;
  $("state").textContent = text;
}

function troubles(newest) {
  const restarts = newest.restarts - recent(LANE_S).restarts;
  const dropped = newest.workers.filter((worker) => worker.state === "dropped").length;
  const found = [];
  if (restarts > 0) found.push(`${counted(restarts, "restart")} in the last minute`);
  if (dropped) found.push(`${dropped} of ${counted(newest.workers.length, "worker")} dropped`);
  return found;
}

function showState(newest) {
  const age = now - newest.time;
  if (end && end.error) setState("failed", "failed");
  else if (end) setState("ended", "ended");
  else if (goodbye && goodbye.of === "run") setState("lost", "lost: its process has exited");
  else if (goodbye) setState("unknown", "muster watch has ended");
  else if (age > Math.max(RUNNING_S, 5 * (Number(run.every_s) || 1))) setState("lost", `lost: no news for ${clock(age)}`);
  else if (troubles(newest).length) setState("troubled", `running, ${troubles(newest).join(", ")}`);
  else setState("running", "running");
  const name = String(run.env ?? "run");
  $("title").textContent = name;
  document.title = `${name} · ${short(newest.frames)} frames · muster watch`;
  $("about").textContent = `${run.collector ?? ""} · ${counted(run.num_envs, "environment")} · pid ${run.pid ?? "?"}`;
}

function showNumbers(newest) {
  const total = run.total_frames, progress = $("progress"), [, rate] = rates();
  const numbers = [
    ["frames", total > 0 ? `${whole(newest.frames)} of ${whole(total)}` : whole(newest.frames)],
    ["frames/s", short(end ? newest.frames_per_s : rate[rate.length - 1])],
    ["elapsed", clock(newest.elapsed ?? newest.time - snapshots[0].time)],
    ["episodes", whole(newest.episodes)],
    ["return", short(newestMean("return", newest.return_mean))],
    ["length", short(newestMean("length", newest.length_mean))],
    ["policy version", String(newest.policy_version)],
    ["policy path", String(newest.policy_path || "–")],
  ];
  if (newest.engine) numbers.push(["engine of nodes", newest.engine]);
  if (newest.restarts) numbers.push(["restarts", whole(newest.restarts)]);
  $("numbers").replaceChildren(...numbers.map(([name, value]) => {
    const pair = element("div"), given = element("dd", value);
    given.id = `number-${name.replace(/\W+/g, "-")}`;
    pair.append(element("dt", name), given);
    return pair;
  }));
  progress.hidden = !(total > 0);
  if (total > 0) progress.value = newest.frames / total;
}

function showTime(newest) {
  const since = recent(60) ?? snapshots[0], seconds = {}, lately = {};
  for (const [name] of PARTS) {
    seconds[name] = newest[`${name}_s`];
    lately[name] = Math.max(0, newest[`${name}_s`] - since[`${name}_s`]);
  }
  const sum = (parts) => Object.values(parts).reduce((a, b) => a + b, 0);
  const all = sum(seconds), last = sum(lately), elapsed = newest.elapsed;
  const rows = PARTS.map(([name, className]) => {
    const text = `${percent(seconds[name] / all)} (${percent(lately[name] / last)})`;
    return [name, seconds[name] / all || 0, className, text];
  });
  bars("time", rows, 1);
  const waits = newest.workers.length && elapsed > 0
    ? ` The main process waited for workers ${percent(newest.wait_s / elapsed)} of the time.` : "";
  $("time").append(element("p", `Shares of the time of rollouts since the start (in the last minute).${waits}`, "note"));
}

function showFrames(newest) {
  const discarded = Object.entries(newest.discarded).filter(([, n]) => n);
  const rows = [
    ["executed", newest.executed, "grey", whole(newest.executed)],
    ["delivered", newest.frames, "green", whole(newest.frames)],
    ...discarded.map(([why, n]) => [`discarded: ${why}`, n, "red", whole(n)]),
    ["in flight", newest.in_flight, "orange", whole(newest.in_flight)],
  ];
  bars("frames", rows, newest.executed);
  const lost = discarded.reduce((sum, [, n]) => sum + n, 0);
  const unseen = newest.unseen ? ` At most ${whole(newest.unseen)} more were lost with nodes.` : "";
  $("equation").textContent =
    `${whole(newest.executed)} = ${whole(newest.frames)} + ${whole(lost)} + ${whole(newest.in_flight)}.${unseen}`;
}

function showLag(newest) {
  const lags = Object.entries(newest.policy_lag).map(([lag, n]) => [Number(lag), n]).sort((a, b) => a[0] - b[0]);
  const shown = lags.slice(0, 11).map(([lag, n]) => [String(lag), n]);
  const more = lags.slice(11).reduce((sum, [, n]) => sum + n, 0);
  if (more) shown.push([`${lags[11][0]} and more`, more]);
  bars("lag", shown.map(([lag, n]) => [lag, n, "blue", whole(n)]), Math.max(1, ...shown.map(([, n]) => n)));
  if (!lags.length) $("lag").replaceChildren(element("div", "no batches", "empty"));
}

function drawLane(canvas, pieces, until) {
  const scale = window.devicePixelRatio || 1, width = 240 * scale, height = 14 * scale;
  canvas.width = width; canvas.height = height;
  const context = canvas.getContext("2d"), every = Number(run.every_s) || 1;
  for (const [time, letters] of pieces) {
    const step = every / Math.max(1, letters.length);
    [...letters].forEach((letter, i) => {
      const age = until - (time - every + i * step);
      if (!PHASES[letter] || age > LANE_S) return;
      context.fillStyle = colour(PHASES[letter][1]);
      context.fillRect(width * (1 - age / LANE_S), 0, Math.max(1, (width * step) / LANE_S + 0.5), height);
    });
  }
}

function showWorkers(newest) {
  const body = $("workers");
  $("workers-card").hidden = !newest.workers.length;
  body.dataset.over = String(end !== null || $("state").dataset.state === "lost");
  $("window").textContent = `${newest.workers.length}`;
  while (body.rows.length > newest.workers.length) body.deleteRow(-1);
  newest.workers.forEach((worker, i) => {
    let row = body.rows[i];
    if (!row) {
      row = body.insertRow();
      for (let cell = 0; cell < 9; cell++) row.insertCell();
      row.insertCell().append(element("canvas", undefined, "lane"));
      [3, 4, 5, 6, 7, 8].forEach((cell) => { row.cells[cell].className = "n"; });
    }
    const memory = worker.memory ? whole(worker.memory / 2 ** 20) : "–";
    [
      worker.node ? `${worker.index} · ${worker.node}` : `${worker.index}`, worker.state, worker.phase,
      whole(worker.frames), percent(worker.share), short(worker.frames_per_s), whole(worker.restarts),
      whole(worker.policy_lag), memory,
    ].forEach((text, cell) => { row.cells[cell].textContent = text; });
    row.cells[1].dataset.state = worker.state;
    row.dataset.worker = worker.index;
    const pieces = (lanes.get(worker.index) ?? []).filter(([time]) => newest.time - time <= LANE_S);
    lanes.set(worker.index, pieces);
    const canvas = row.cells[9].firstChild;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `phases of worker ${worker.index} in the last minute`);
    drawLane(canvas, pieces, newest.time);
  });
}

// Errors that differ in numbers only (of workers, processes, steps) are one entry.
const kindOf = (text) => text.split("\n")[0].replace(/\d+/g, "#");

function kindsOfErrors() { // newest first: key, newest error, number of errors, their workers
  const kinds = new Map();
  for (const error of [...errors.values()].sort((a, b) => a.time - b.time)) {
    const key = kindOf(error.text);
    const kind = kinds.get(key) ?? { key, count: 0, workers: new Set() };
    kinds.delete(key); // to be the last of them
    kinds.set(key, { ...kind, newest: error, count: kind.count + 1, workers: kind.workers.add(error.worker) });
  }
  return [...kinds.values()].reverse();
}

function errorEntry(kind, isEnd) {
  const item = element("li"), details = element("details"), summary = element("summary"), error = kind.newest;
  const key = isEnd ? "end" : kind.key;
  details.dataset.key = key;
  details.open = opened.has(key);
  details.addEventListener("toggle", () => (details.open ? opened.add(key) : opened.delete(key)));
  const workers = [...kind.workers].filter((worker) => Number.isFinite(worker)).sort((a, b) => a - b);
  const facts = [];
  if (workers.length) facts.push(`worker${workers.length > 1 ? "s" : ""} ${workers.slice(0, 8).join(", ")}${workers.length > 8 ? " ..." : ""}`);
  if (error.time) facts.push(`${kind.count > 1 ? "last " : ""}${new Date(1000 * error.time).toLocaleTimeString()}`);
  if (kind.count > 1) summary.append(element("b", `${kind.count} times`));
  summary.append(element("span", error.text.split("\n")[0]), element("small", facts.join(", ")));
  details.append(summary, element("pre", error.text));
  if (error.crash_report) {
    const replay = error.replay || `muster replay ${error.crash_report}`;
    details.append("To see it happen again under a debugger: ", element("code", replay));
  }
  if (isEnd) item.append("The collection ended with this error.");
  item.append(details);
  return item;
}

function showErrors() {
  const failed = end && end.error ? end.error : "";
  $("errors-card").hidden = !errors.size && !failed;
  const shows = JSON.stringify([[...errors.values()], failed]);
  if (shows === listed) return; // what the viewer has opened and selected stays
  listed = shows;
  const focused = document.activeElement && document.activeElement.parentElement.dataset.key;
  const kinds = kindsOfErrors(), last = failed && kinds.find((kind) => kind.key === kindOf(failed));
  const others = kinds.filter((kind) => kind !== last).slice(0, MOST_KINDS);
  const items = others.map((kind) => errorEntry(kind, false));
  if (failed) {
    items.unshift(errorEntry(last || { newest: { text: failed }, count: 1, workers: new Set() }, true));
  }
  const more = items.splice(FIRST_KINDS);
  if (more.length) {
    const item = element("li"), details = element("details"), list = element("ol");
    details.dataset.key = "more";
    details.open = opened.has("more");
    details.addEventListener("toggle", () => (details.open ? opened.add("more") : opened.delete("more")));
    list.append(...more);
    details.append(element("summary", `${more.length} more`), list);
    item.append(details);
    items.push(item);
  }
  $("errors").replaceChildren(...items);
  const again = [...document.querySelectorAll("#errors details")].find((each) => each.dataset.key === focused);
  if (focused && again) again.firstChild.focus();
}

const told = (e) => `return ${Number(e.episode_return.toPrecision(6))}, ${counted(e.length, "step")}, environment ${e.env_id}`;

function showEpisodes() {
  $("films-card").hidden = !episodes.size && !run.no_film;
  const focused = document.activeElement && document.activeElement.dataset.which;
  const rows = ["newest", "best", "worst"].filter((which) => episodes.has(which)).map((which) => {
    const episode = episodes.get(which), row = element("li");
    row.append(element("b", which), element("span", told(episode)));
    if (episode.missing) {
      row.append(element("small", episode.missing));
      return row;
    }
    const button = element("button", filming === which ? "Making the film" : "Film");
    button.type = "button";
    button.dataset.which = which;
    button.disabled = filming !== "";
    button.setAttribute("aria-label", `Film of the ${which} episode`);
    button.addEventListener("click", () => makeFilm(which));
    row.append(button);
    return row;
  });
  if (run.no_film) rows.push(element("li", String(run.no_film)));
  $("episodes").replaceChildren(...rows);
  const again = focused && document.querySelector(`#episodes button[data-which=${focused}]`);
  if (again) again.focus();
}

async function makeFilm(which) {
  const note = $("film-note"), video = $("film");
  filming = which;
  video.pause();
  video.hidden = true;
  showEpisodes();
  note.textContent = `Repeating the ${which} episode. A long one takes minutes.`;
  let made;
  try {
    made = await (await fetch(`films/${which}`, { method: "POST", headers: { "X-Muster-Watch": "1" } })).json();
  } catch {
    made = { error: "No connection to muster watch." };
  }
  filming = "";
  showEpisodes();
  if (made.error) {
    note.textContent = made.error;
    return;
  }
  note.textContent = `${which}: ${told(made)}; ${counted(made.frames, "frame")}. ${made.note}`;
  video.src = `films/${made.film}.mp4`;
  video.setAttribute("aria-label", `Film of the ${which} episode`);
  video.hidden = false;
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) video.play().catch(() => {});
}

function show() {
  const newest = snapshots[snapshots.length - 1];
  if (paused) return;
  if (!newest) { setState("unknown", "no snapshots yet"); return; }
  showState(newest);
  if (!dirty || document.hidden) return;
  dirty = false;
  showNumbers(newest);
  showErrors();
  showEpisodes();
  chart("rate", rates(), "Frames per second", "one snapshot");
  chart("return", runningMeans("return"), "Mean return", "no episode has ended");
  chart("length", runningMeans("length"), "Mean length", "no episode has ended");
  const success = runningMeans("success");
  $("success-card").hidden = !success[0].length;
  if (success[0].length) chart("success", success, "Success rate", "");
  const known = snapshots.filter((s) => s.memory > 0);
  chart("memory", [known.map((s) => s.time - snapshots[0].time), known.map((s) => s.memory / 2 ** 20)], "MiB", "unknown");
  $("slots").textContent = `Slots: ${Object.entries(newest.slots).map(([state, n]) => `${n} ${state}`).join(", ")}`;
  showTime(newest);
  showFrames(newest);
  showLag(newest);
  showWorkers(newest);
}

function redraw() { // with other colours or sizes
  for (const made of charts.values()) made.destroy();
  charts.clear();
  dirty = true;
  showLegend();
  show();
}

function showLegend() {
  $("legend").replaceChildren();
  for (const [name, variable] of SHOWN) {
    const sample = element("b"), entry = element("span");
    sample.style.background = colour(variable);
    entry.append(sample, name);
    $("legend").append(entry);
  }
}

function pause() {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  $("pause").textContent = paused ? "Continue" : "Pause";
  show();
}

$("pause").addEventListener("click", pause);
document.addEventListener("keydown", (event) => {
  if (event.key === "p" && !event.ctrlKey && !event.metaKey && !event.altKey) pause();
});
document.addEventListener("visibilitychange", show);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let timer = 0;
addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(redraw, 150); });
showLegend();
listen();
