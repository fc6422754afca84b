# Of ctest's LastTest.log: how many tests passed, of a suite of GoogleTest's each.
/^[0-9]+\/[0-9]+ Testing: / { of_suite = 0 }
/^\[       OK \] / { ++of_suite }
/^Test Passed\.$/ { passed += of_suite > 0 ? of_suite : 1 }
END { print passed + 0 }
