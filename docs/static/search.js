// Pages for users come before those about Hocket's inside, and changelogs last.
const placeOfPage = [
  [/CHANGELOG$/, -60],
  [/^packages\/core-runtime\/src\/|^integration-tests\//, -50],
  [/^docs\/(architecture|mechanisms|api_plugins|own_plugin|own_task|reproducing)$|^(CONTRIBUTING|SECURITY)$/, -30],
  [/^docs\/(getting_started|works_with|choosing|troubleshooting)$/, 20],
  [/^packages\/\w+\/README$/, 8],
  [/^(README|examples\/README)$|^docs\//, 10],
];
var Scorer = {
  score: ([page, , , , score]) => score + (placeOfPage.find(([pattern]) => pattern.test(page)) || [, 0])[1],
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
