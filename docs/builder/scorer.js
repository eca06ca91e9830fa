// How search ranks pages: what to do first, then what a name means, then reasons and history.
var Scorer = {
  score: ([docname, title, anchor, description, score]) => {
    const first = ["recipes/", "start", "guide", "save_and_continue", "tutorials/"];
    const last = ["decisions/", "changelog", "contributing", "architecture", "control_path", "fault_matrix", "status"];
    const others = ["torchrl", "sb3", "cleanrl", "tianshou", "prt_rl", "rlpyt", "exactness", "episode_rules", "how_fast"];
    const is = (names) => names.some((name) => docname === name || (name.endsWith("/") && docname.startsWith(name)));
    if (is(first)) return score + 40;
    if (is(last)) return score - 100;
    if (is(others)) return score - 30;
    if (docname.startsWith("reference/")) return score - 10;
    return score + 20;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
