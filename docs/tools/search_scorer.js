// The order of search results. Sphinx reads this in the place of its own `Scorer`, whose numbers are those below.
// Who searches for a word wants the page that explains it; the page of a name comes first where exactly that name is searched.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  score: function ([docname, title, anchor, descr, score, filename]) {
    const query = new URLSearchParams(window.location.search).get("q").trim().toLowerCase();
    const name = title.split(/[.\s]/).pop().toLowerCase();
    if (docname.startsWith("lookup/reference/") && name !== query) return score - 100;
    const inTitle = title.toLowerCase().includes(query) ? 3 : 0; // all words in this order: "n-step", not a "step" alone
    return score + inTitle + (docname.startsWith("do/") ? 5 : 0);
  },
};
