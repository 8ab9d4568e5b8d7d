// How the site's search orders pages: Sphinx's numbers, except that the list of changes comes last.
var Scorer = {
  score: ([docname, title, anchor, descr, score]) => (docname === "reference/changes" ? score - 1000 : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
