// The page of `muster watch`. Everything from the file of the run is shown as text (textContent), never as HTML.
"use strict";

const NEWS_S = 10; // a run without snapshots for longer does not answer
const LEAST_STALL_S = 30, STALL_GAPS = 3; // without a batch, and in the longest times between two batches so far
const LANE_S = 60;
const FIRST_KINDS = 3, MOST_KINDS = 20; // of errors: shown at once, and in all
const WINDOW = 100; // episodes of a running mean; episodes/curve.py computes the same
const PARTS = [["env", "green"], ["policy", "blue"], ["copy", "orange"], ["rest", "grey"]];
const PHASES = { // letters of observing/watching.py: name, colour
  "s": ["step", "--green"], "p": ["policy", "--blue"], "r": ["reset", "--orange"], "w": ["weights", "--pink"],
  "-": ["wait", "--sky"], "c": ["construct", "--pink"], "j": ["join", "--pink"], "q": ["call", "--pink"],
  "x": ["close", "--grey"], "D": ["dead", "--red"], "X": ["dropped", "--red"],
};
const SHOWN = [["step", "--green"], ["policy", "--blue"], ["reset", "--orange"], ["wait", "--sky"],
  ["construct, weights, calls", "--pink"], ["dead", "--red"]];
const OF_RUNS = ["--blue", "--orange", "--green", "--pink", "--sky", "--red", "--grey"];
const DEFAULTS = { smooth: 0, restarts: 3, lag: 10, stall: "", rate: "", return: "" }; // what the address keeps
const SECONDS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
const CALM = ["running", "ended", "stopped", "joining", "unknown"]; // states without a mark in the title

let goodbye = null; // the last event of the server
let isConnected = true;
const opened = new Set(["end"]); // keys of errors whose texts are shown
let listed = ""; // what the list of errors shows
const runs = []; // see runOf
let selected = 0, now = 0, paused = false, dirty = true;
let filming = ""; // the episode of which a film is being made
const charts = new Map();
const settings = { ...DEFAULTS };

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

function runOf(number) { // with everything that its file has
  if (!runs[number]) {
    runs[number] = { number, name: "", process: { state: "unknown" } };
    forget(runs[number]);
  }
  return runs[number];
}

function forget(run) {
  Object.assign(run, { about: {}, end: null, snapshots: [], errors: new Map(), episodes: new Map(), lanes: new Map() });
}

function take(run, entry) {
  if (entry.kind === "run") run.about = entry;
  else if (entry.kind === "end") run.end = entry;
  else if (entry.kind === "error") run.errors.set(entry.id, entry);
  else if (entry.kind === "episode") run.episodes.set(entry.which, entry);
  else {
    run.snapshots.push(entry);
    for (const worker of entry.workers) { // by its number: [[time, letters], ...] of the last minute
      if (!run.lanes.has(worker.index)) run.lanes.set(worker.index, []);
      run.lanes.get(worker.index).push([entry.time, worker.lane]);
    }
  }
}

function listen() {
  const source = new EventSource("events");
  const on = (name, use) => source.addEventListener(name, (event) => { use(JSON.parse(event.data)); dirty = true; });
  on("restart", (given) => { forget(runOf(given.run)); runOf(given.run).name = given.name; });
  on("entries", (given) => given.entries.forEach((entry) => take(runOf(given.run), entry)));
  on("process", (given) => { runOf(given.run).process = given; });
  source.addEventListener("clock", (event) => { isConnected = true; now = JSON.parse(event.data); show(); });
  on("goodbye", (given) => {
    source.close(); // otherwise the browser would try to connect again
    goodbye = given;
    $("over").hidden = false;
    $("over").querySelector("code").textContent = given.command;
    dirty = true;
    show();
  });
  source.onerror = () => {
    isConnected = false;
    setState($("state"), ["unknown", "no connection to muster watch"]);
  };
}

// --- numbers -----------------------------------------------------------------------------------------------

const newestOf = (run) => run.snapshots[run.snapshots.length - 1];
const everyOf = (run) => Number(run.about.every_s) || 1;
const nameOf = (run) => (runs.length > 1 ? run.name : String(run.about.env ?? "run"));

// As `running_means` of episodes/curve.py: frames, mean, ends of its 95 % interval.
function runningMeans(run, what) {
  const zero = { episodes: 0, judged: 0, return_sum: 0, return_squares: 0, length_sum: 0, length_squares: 0, success_sum: 0 };
  const points = [[0, zero]];
  for (const s of run.snapshots) if (!Object.values(s.totals).includes(null)) points.push([s.frames, s.totals]);
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

function rates(run) {
  const columns = [[], []], least = everyOf(run) / 2; // the last snapshot follows the one before at once
  let before = run.snapshots[0];
  for (const s of run.snapshots) {
    if (s.time - before.time < least) continue;
    columns[0].push(s.time - run.snapshots[0].time);
    columns[1].push(Math.max(0, s.frames - before.frames) / (s.time - before.time));
    before = s;
  }
  return columns;
}

function memoryOf(run) {
  const known = run.snapshots.filter((s) => s.memory > 0);
  return [known.map((s) => s.time - run.snapshots[0].time), known.map((s) => s.memory / 2 ** 20)];
}

function ownMetric(run, name) { // frames, means of the values of snapshots with the same frames; how many are not finite
  const columns = [[], []], last = { frames: -1, count: 0 };
  let bad = 0;
  for (const s of run.snapshots) {
    const given = s.metrics && Object.hasOwn(s.metrics, name) ? s.metrics[name] : null;
    if (!given) continue;
    bad += given[2];
    if (given[0] === null) continue;
    const [mean, count] = given, at = columns[1].length - 1;
    if (s.metrics_at <= last.frames) {
      last.count += count;
      columns[1][at] += ((mean - columns[1][at]) * count) / last.count;
    } else {
      columns[0].push(s.metrics_at); columns[1].push(mean);
      Object.assign(last, { frames: s.metrics_at, count });
    }
  }
  return { columns, bad };
}

function ownNames() {
  const names = new Set();
  for (const run of runs) for (const s of run.snapshots) for (const name of Object.keys(s.metrics ?? {})) names.add(name);
  return [...names];
}

// An exponential average with the weight of the last value, without the bias of its start, as in TensorBoard.
function smoothed(values, weight) {
  if (!(weight > 0)) return values;
  let sum = 0, of = 0;
  return values.map((value) => {
    sum = sum * weight + value * (1 - weight);
    of = of * weight + (1 - weight);
    return sum / of;
  });
}

const lastOf = (values) => values[values.length - 1];

function newestMean(run, what, otherwise) { // the last value of the curve
  const means = smoothed(runningMeans(run, what)[1], settings.smooth);
  return means.length ? lastOf(means) : otherwise;
}

function recent(run, seconds) { // the first snapshot of the last seconds
  const newest = newestOf(run);
  return run.snapshots.find((s) => newest.time - s.time <= seconds);
}

function newestLag(run) { // the largest lag of the batches of the last snapshots; null: no batch
  const newest = newestOf(run), before = recent(run, LANE_S) ?? newest;
  const lags = Object.keys(newest.policy_lag);
  const changed = lags.filter((lag) => newest.policy_lag[lag] !== (before.policy_lag[lag] ?? 0));
  return lags.length ? Math.max(...(changed.length ? changed : lags).map(Number)) : null;
}

// --- what is wrong -----------------------------------------------------------------------------------------

const limit = (name) => (settings[name] === "" ? null : Number(settings[name]));
const restartsPerMinute = (run) => newestOf(run).restarts - recent(run, LANE_S).restarts;

function withoutBatch(run) { // seconds without a batch, and from how many seconds on that is a stall
  let since = run.snapshots[0].time, longest = 0, batches = run.snapshots[0].batches;
  for (const s of run.snapshots) {
    if (s.batches === batches) continue;
    longest = Math.max(longest, s.time - since);
    since = s.time;
    batches = s.batches;
  }
  return [newestOf(run).time - since, limit("stall") ?? Math.max(LEAST_STALL_S, STALL_GAPS * longest)];
}

const MEANINGS = { SIGINT: "ended by Ctrl-C", SIGTERM: "ended by SIGTERM" };

function howExited(exit) { // of the last line of a file, or of the process
  const signal = String(exit.signal ?? "");
  if (MEANINGS[signal]) return ["stopped", MEANINGS[signal]];
  if (signal) return ["failed", `crashed: killed by ${signal}`];
  if (exit.code === 0) return ["failed", "crashed: its process has exited without shutdown()"];
  if (Number.isFinite(exit.code)) return ["failed", `crashed: its process has exited with code ${exit.code}`];
  return ["failed", "crashed: its process is gone, without an end"];
}

function howEnded(run) {
  const error = String(run.end.error ?? "").split("\n")[0];
  if (/^KeyboardInterrupt\b/.test(error)) return ["stopped", "ended by Ctrl-C"];
  if (error) return ["failed", `crashed: ${error.split(":")[0].slice(0, 60)}`];
  if (run.end.signal || run.end.code !== undefined) return howExited(run.end);
  const frames = newestOf(run).frames, total = run.about.total_frames; // after a break, or `muster collect` after a signal
  return ["ended", total > 0 && frames < total ? `ended after ${short(frames)} of ${short(total)} frames` : "ended"];
}

function stateOf(run) { // a kind, which has a colour, and a text
  const newest = newestOf(run);
  if (!newest) return ["unknown", "no snapshots yet"];
  const age = now - newest.time, isAlive = run.process.state === "alive", errors = [];
  if (run.end) return howEnded(run);
  if (run.process.state === "exited") return howExited(run.process);
  if (goodbye && goodbye.of === "run") return howExited({});
  if (goodbye) return ["unknown", "muster watch has ended"];
  if (run.process.state === "stopped") return ["lost", "suspended (SIGSTOP, Ctrl-Z)"];
  if (age > Math.max(NEWS_S, 5 * everyOf(run))) {
    return ["lost", `${isAlive ? "its process does not answer" : "lost: no news"} for ${clock(age)}`];
  }
  const restarts = restartsPerMinute(run), [quiet, most] = withoutBatch(run);
  const dropped = newest.workers.filter((worker) => worker.state === "dropped").length;
  if (restarts > 0) errors.push(`${counted(restarts, "restart")} in the last minute`);
  if (dropped) errors.push(`${dropped} of ${counted(newest.workers.length, "worker")} dropped`);
  if (quiet > most) {
    const areIdle = newest.workers.length && newest.workers.every((worker) => worker.phase === "idle");
    const why = areIdle ? " (the workers are idle: the program asks for none)" : "";
    return ["stalled", `stalled: no batch for ${clock(quiet)}${why}`];
  }
  if (limit("restarts") !== null && restarts > limit("restarts")) return ["troubled", `restarting often: ${errors.join(", ")}`];
  return errors.length ? ["troubled", `running, ${errors.join(", ")}`] : ["running", "running"];
}

function alarms(run) { // by the name of a number: why it is red
  const found = new Map(), newest = newestOf(run), lag = newestLag(run);
  const [, means, low, high] = runningMeans(run, "return");
  if (means.length > 1 && newest.totals.episodes >= 2 * WINDOW) {
    const best = low.indexOf(Math.max(...low)), last = means.length - 1;
    if (high[last] < low[best]) found.set("return", `fallen from ${short(means[best])}`);
  }
  const mean = newestMean(run, "return", newest.return_mean);
  if (limit("return") !== null && mean !== null && mean < limit("return")) found.set("return", `below ${short(limit("return"))}`);
  const rate = lastOf(smoothed(rates(run)[1], settings.smooth));
  if (limit("rate") !== null && !run.end && rate < limit("rate")) found.set("frames/s", `below ${short(limit("rate"))}`);
  const restarts = restartsPerMinute(run);
  if (limit("restarts") !== null && restarts > limit("restarts")) {
    found.set("restarts", `${whole(restarts)} in the last minute`);
  }
  if (limit("lag") !== null && lag !== null && lag > limit("lag")) found.set("policy lag", `above ${limit("lag")}`);
  return found;
}

// --- drawing -----------------------------------------------------------------------------------------------

// Draw one curve, or one of each run. `curves`: [{ run, columns }], columns as those of rates or runningMeans.
function chart(id, curves, label, text, isTime) {
  const box = $(id), given = curves.filter(({ columns }) => columns[0].length);
  if (!given.length) {
    if (!charts.has(id)) box.replaceChildren(element("div", text, "empty"));
    return;
  }
  const weight = settings.smooth, lines = given.map(({ columns }) => [columns[0], smoothed(columns[1], weight)]);
  const values = lines.map(([, line]) => lastOf(line)), isOne = runs.length === 1, [{ columns }] = given;
  const isBanded = isOne && columns.length === 4, hasRaw = isOne && weight > 0;
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", `${label}: newest value ${values.map(short).join(", ")}`);
  box.dataset.value = values.join(" ");
  const data = isOne
    ? [...lines[0], ...(isBanded ? columns.slice(2) : []), ...(hasRaw ? [columns[1]] : [])]
    : uPlot.join(lines);
  const shape = JSON.stringify([given.map(({ run }) => run.number), isBanded, hasRaw, lines.some(([x]) => x.length < 3)]);
  const known = charts.get(id);
  if (known && known.shape === shape) { known.plot.setData(data); return; }
  if (known) known.plot.destroy();
  const axis = (shown) => ({ stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 },
    ticks: { stroke: colour("--line"), width: 1 }, font: "11px system-ui", values: shown,
    size: (_, texts) => 17 + 6.5 * Math.max(4, ...(texts ?? []).map((given) => given.length)) });
  const ticks = (_, found) => found.map(short);
  const seconds = (_, found) => found.map((s) => clock(s)), steps = isTime ? { incrs: SECONDS } : {};
  const line = (run) => ({ stroke: colour(OF_RUNS[run.number % OF_RUNS.length]), width: 2, spanGaps: true,
    dash: run.number < OF_RUNS.length ? undefined : [6, 4], points: { show: lines.some(([x]) => x.length < 3) } });
  const edge = { stroke: "transparent", width: 0, points: { show: false } };
  const raw = { stroke: colour("--faint"), width: 1, points: { show: false } };
  const drawn = isOne
    ? [line(given[0].run), ...(isBanded ? [edge, edge] : []), ...(hasRaw ? [raw] : [])]
    : given.map(({ run }) => line(run));
  box.replaceChildren();
  const plot = new uPlot({
    width: box.clientWidth, height: box.clientHeight, legend: { show: false },
    cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
    hooks: { setCursor: [(made) => { // the values below the pointer
      const at = made.cursor.idx, shown = $(`${id}-at`);
      if (!shown) return;
      const below = at === null || at === undefined ? [] : made.data.slice(1, isOne ? 2 : undefined).map((column) => short(column[at]));
      shown.textContent = below.length ? `${(isTime ? clock : short)(made.data[0][at])}: ${below.join(" · ")}` : "";
    }] },
    scales: { x: { time: false }, y: isTime ? { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } : {} },
    axes: [{ ...axis(isTime ? seconds : ticks), ...steps, size: 28 }, axis(ticks)],
    series: [{}, ...drawn],
    bands: isBanded ? [{ series: [3, 2], fill: colour("--band") }] : [],
  }, data, box);
  charts.set(id, { plot, shape });
  sizes.observe(box);
}

const sizes = new ResizeObserver((boxes) => requestAnimationFrame(() => { // cards appear, windows change
  for (const { target } of boxes) {
    const made = charts.get(target.id), width = target.clientWidth, height = target.clientHeight;
    if (made && width && (made.plot.width !== width || made.plot.height !== height)) made.plot.setSize({ width, height });
  }
}));

function showOwn() { // a chart for each name of the user's metrics
  const names = ownNames(), place = $("own");
  while (place.children.length > names.length) {
    const last = place.lastChild;
    charts.get(last.querySelector(".chart").id)?.plot.destroy();
    charts.delete(last.querySelector(".chart").id);
    last.remove();
  }
  names.forEach((name, i) => {
    const id = `own-${i}`;
    let card = place.children[i];
    if (!card) {
      card = element("section");
      const title = element("h2"), box = element("div", undefined, "chart"), at = element("output", undefined, "at");
      box.id = id; at.id = `${id}-at`;
      title.append(element("span"), at);
      card.append(title, box, element("p", undefined, "note"));
      place.append(card);
    }
    card.querySelector("h2 span").textContent = name;
    const found = runs.map((run) => ({ run, ...ownMetric(run, name) }));
    chart(id, found, name, "no finite value", false);
    const bad = found.reduce((sum, one) => sum + one.bad, 0), note = card.querySelector("p");
    note.textContent = bad ? `${counted(bad, "value")} not finite (NaN, infinite)` : "";
    note.dataset.alarm = String(bad > 0);
  });
  const more = Math.max(0, ...runs.map((run) => newestOf(run)?.metrics_left_out ?? 0));
  $("own-more").hidden = !more;
  $("own-more").textContent = `${whole(more)} more metrics have no chart.`;
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

function setState(place, [state, text]) {
  place.dataset.state = state;
  place.textContent = text;
}

function showState(run) {
  const newest = newestOf(run), state = stateOf(run), about = run.about;
  setState($("state"), state);
  const errors = run.errors.size + (run.end && run.end.error ? 1 : 0);
  $("errors-link").hidden = !errors;
  $("errors-link").textContent = counted(errors, "error");
  $("title").textContent = nameOf(run);
  document.title = `${CALM.includes(state[0]) ? "" : "\u26a0 "}${nameOf(run)} · ${short(newest.frames)} frames · muster watch`;
  const env = runs.length > 1 ? `${about.env ?? ""} · ` : "";
  $("about").textContent = `${env}${about.collector ?? ""} · ${counted(about.num_envs, "environment")} · pid ${about.pid ?? "?"}`;
}

function showRuns() { // a row for each of several runs
  $("runs-card").hidden = runs.length < 2;
  if (runs.length < 2) return;
  const body = $("runs");
  runs.forEach((run, i) => {
    let row = body.rows[i];
    if (!row) {
      row = body.insertRow();
      for (let cell = 0; cell < 8; cell++) row.insertCell().className = cell > 1 ? "n" : "";
      const choose = element("button"), sample = element("b");
      choose.type = "button";
      choose.addEventListener("click", () => { selected = i; listed = ""; dirty = true; show(); });
      row.cells[0].append(sample, choose);
    }
    row.dataset.run = i;
    row.cells[0].firstChild.style.background = colour(OF_RUNS[i % OF_RUNS.length]);
    row.cells[0].lastChild.textContent = run.name;
    row.cells[0].lastChild.setAttribute("aria-pressed", String(i === selected));
    setState(row.cells[1], stateOf(run));
    const newest = newestOf(run);
    if (!newest) return;
    const red = alarms(run), shown = numbersOf(run);
    ["frames", "frames/s", "elapsed", "return", "length", "restarts"].forEach((name, at) => {
      row.cells[at + 2].textContent = shown.get(name);
      row.cells[at + 2].dataset.alarm = String(red.has(name));
      row.cells[at + 2].title = red.get(name) ?? "";
    });
  });
}

function numbersOf(run) { // texts by name
  const newest = newestOf(run), total = run.about.total_frames, lag = newestLag(run);
  const numbers = new Map([
    ["frames", total > 0 ? `${whole(newest.frames)} of ${whole(total)}` : whole(newest.frames)],
    ["frames/s", short(run.end ? newest.frames_per_s : lastOf(smoothed(rates(run)[1], settings.smooth)))],
    ["elapsed", clock(newest.elapsed ?? newest.time - run.snapshots[0].time)],
    ["episodes", whole(newest.episodes)],
    ["return", short(newestMean(run, "return", newest.return_mean))],
    ["length", short(newestMean(run, "length", newest.length_mean))],
    ["policy version", Number.isFinite(newest.policy_version) ? whole(newest.policy_version) : String(newest.policy_version)],
    ["policy lag", lag === null ? "–" : whole(lag)],
    ["restarts", whole(newest.restarts)],
  ]);
  return numbers;
}

function showNumbers(run) {
  const newest = newestOf(run), total = run.about.total_frames, progress = $("progress"), red = alarms(run);
  const numbers = [...numbersOf(run)].filter(([name]) => name !== "restarts" || newest.restarts);
  $("numbers").replaceChildren(...numbers.map(([name, value]) => {
    const pair = element("div"), given = element("dd", value);
    given.id = `number-${name.replace(/\W+/g, "-")}`;
    given.dataset.alarm = String(red.has(name));
    pair.append(element("dt", name), given);
    if (red.has(name)) pair.append(element("small", red.get(name)));
    return pair;
  }));
  progress.hidden = !(total > 0);
  if (total > 0) progress.value = newest.frames / total;
}

function showFacts(run) {
  const newest = newestOf(run), about = run.about, rows = [];
  const texts = (given) => (given && typeof given === "object" ? Object.entries(given) : []);
  rows.push(["actions computed by", String(newest.policy_path || "–")]);
  if (newest.engine) rows.push(["engine of nodes", newest.engine]);
  if (newest.capture) rows.push(["capture", newest.capture]);
  const section = (title, pairs) => {
    const list = element("dl", undefined, "facts");
    pairs.forEach(([name, value]) => list.append(element("dt", name), element("dd", String(value))));
    const made = element("div");
    made.append(element("h3", title), list);
    return made;
  };
  $("facts").replaceChildren(section("Options", [...texts(about.options), ...rows]), section("Versions", texts(about.versions)));
}

function showTime(run) {
  const newest = newestOf(run), since = recent(run, LANE_S) ?? run.snapshots[0], seconds = {}, lately = {};
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
    ...discarded.map(([why, n]) => [`discarded: ${why.replaceAll("_", " ")}`, n, "red", whole(n)]),
    ["in flight", newest.in_flight, "orange", whole(newest.in_flight)],
  ];
  bars("frames", rows, newest.executed);
  const lost = discarded.reduce((sum, [, n]) => sum + n, 0);
  const unseen = newest.unseen ? ` At most ${whole(newest.unseen)} more were lost with nodes.` : "";
  $("equation").textContent = `${whole(newest.frames)} delivered + ${whole(lost)} lost + ${whole(newest.in_flight)} pending`
    + ` = ${whole(newest.executed)} executed.${unseen}`;
}

function showLag(newest) {
  const lags = Object.entries(newest.policy_lag).map(([lag, n]) => [Number(lag), n]).sort((a, b) => a[0] - b[0]);
  const shown = lags.slice(0, 11).map(([lag, n]) => [String(lag), n]);
  const more = lags.slice(11).reduce((sum, [, n]) => sum + n, 0);
  if (more) shown.push([`${lags[11][0]} and more`, more]);
  bars("lag", shown.map(([lag, n]) => [lag, n, "blue", whole(n)]), Math.max(1, ...shown.map(([, n]) => n)));
  if (!lags.length) $("lag").replaceChildren(element("div", "no batches", "empty"));
}

function drawLane(canvas, pieces, until, every) {
  const scale = window.devicePixelRatio || 1, width = 240 * scale, height = 14 * scale;
  canvas.width = width; canvas.height = height;
  const context = canvas.getContext("2d");
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

function showWorkers(run) {
  const body = $("workers"), newest = newestOf(run);
  $("workers-card").hidden = !newest.workers.length;
  body.dataset.over = String(["ended", "stopped", "failed", "lost"].includes($("state").dataset.state));
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
    const pieces = (run.lanes.get(worker.index) ?? []).filter(([time]) => newest.time - time <= LANE_S);
    run.lanes.set(worker.index, pieces);
    const canvas = row.cells[9].firstChild;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `phases of worker ${worker.index} in the last minute`);
    drawLane(canvas, pieces, newest.time, everyOf(run));
  });
}

// Errors that differ in numbers only (of workers, processes, steps) are one entry.
const kindOf = (text) => text.split("\n")[0].replace(/\d+/g, "#");

function kindsOfErrors(errors) { // newest first: key, newest error, number of errors, their workers
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

function showErrors(run) {
  const errors = run.errors, failed = run.end && run.end.error ? String(run.end.error) : "";
  $("errors-card").hidden = !errors.size && !failed;
  const shows = JSON.stringify([[...errors.values()], failed]);
  if (shows === listed) return; // what the viewer has opened and selected stays
  listed = shows;
  const focused = document.activeElement && document.activeElement.parentElement.dataset.key;
  const kinds = kindsOfErrors(errors), last = failed && kinds.find((kind) => kind.key === kindOf(failed));
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

function showEpisodes(run) {
  const episodes = run.episodes, noFilm = run.about.no_film;
  $("films-card").hidden = !episodes.size && !noFilm;
  const focused = document.activeElement && document.activeElement.dataset.which;
  const rows = ["newest", "best", "worst"].filter((which) => episodes.has(which)).map((which) => {
    const episode = episodes.get(which), row = element("li");
    row.append(element("b", which), element("span", told(episode)));
    if (episode.missing) {
      row.append(element("small", episode.missing));
      return row;
    }
    const button = element("button", filming === `${run.number}/${which}` ? "Making the film" : "Film");
    button.type = "button";
    button.dataset.which = which;
    button.disabled = filming !== "";
    button.setAttribute("aria-label", `Film of the ${which} episode`);
    button.addEventListener("click", () => makeFilm(run, which));
    row.append(button);
    return row;
  });
  if (noFilm) rows.push(element("li", String(noFilm)));
  $("episodes").replaceChildren(...rows);
  const again = focused && document.querySelector(`#episodes button[data-which=${focused}]`);
  if (again) again.focus();
}

async function makeFilm(run, which) {
  const note = $("film-note"), video = $("film");
  filming = `${run.number}/${which}`;
  video.pause();
  video.hidden = true;
  showEpisodes(runs[selected]);
  note.textContent = `Repeating the ${which} episode. A long one takes minutes.`;
  let made;
  try {
    made = await (await fetch(`films/${run.number}/${which}`, { method: "POST", headers: { "X-Muster-Watch": "1" } })).json();
  } catch {
    made = { error: "No connection to muster watch." };
  }
  filming = "";
  showEpisodes(runs[selected]);
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
  if (paused || !isConnected) return;
  const run = runs[selected];
  if (!run || !newestOf(run)) { setState($("state"), ["unknown", "no snapshots yet"]); return; }
  showState(run);
  showRuns();
  if (!dirty || document.hidden) return;
  dirty = false;
  const shown = runs.filter(newestOf), curves = (of) => shown.map((each) => ({ run: each, columns: of(each) }));
  showNumbers(run);
  chart("rate", curves(rates), "Frames per second", "one snapshot", true);
  chart("return", curves((each) => runningMeans(each, "return")), "Mean return", "no episode has ended");
  chart("length", curves((each) => runningMeans(each, "length")), "Mean length", "no episode has ended");
  const success = curves((each) => runningMeans(each, "success"));
  $("success-card").hidden = !success.some(({ columns }) => columns[0].length);
  if (!$("success-card").hidden) chart("success", success, "Success rate", "");
  showOwn();
  chart("memory", curves(memoryOf), "MiB", "unknown", true);
  $("held").textContent = `Batches you still hold: ${whole(newestOf(run).slots.lent ?? 0)}`;
  showErrors(run);
  showEpisodes(run);
  showTime(run);
  showFrames(newestOf(run));
  showLag(newestOf(run));
  showWorkers(run);
  showFacts(run);
}

// --- settings, which the address keeps -----------------------------------------------------------------------

function readSettings() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const [name, otherwise] of Object.entries(DEFAULTS)) {
    const text = given.get(name), isNumber = text !== null && text !== "" && Number.isFinite(Number(text));
    settings[name] = isNumber ? Number(text) : text === "" ? "" : otherwise;
    $(`set-${name}`).value = settings[name];
  }
  settings.smooth = Math.min(0.999, Math.max(0, Number(settings.smooth)));
}

function change(name) {
  const text = $(`set-${name}`).value.trim(), given = new URLSearchParams(location.hash.slice(1));
  if (text === String(DEFAULTS[name])) given.delete(name);
  else given.set(name, text);
  history.replaceState(null, "", String(given) ? `#${given}` : location.pathname);
  readSettings();
  dirty = true;
  show();
}

function redraw() { // with other colours
  for (const made of charts.values()) made.plot.destroy();
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
for (const name of Object.keys(DEFAULTS)) $(`set-${name}`).addEventListener("change", () => change(name));
addEventListener("hashchange", () => { readSettings(); dirty = true; show(); });
document.addEventListener("keydown", (event) => {
  if (event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement) return;
  if (event.key === "p" && !event.ctrlKey && !event.metaKey && !event.altKey) pause();
});
document.addEventListener("visibilitychange", show);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
readSettings();
showLegend();
listen();
