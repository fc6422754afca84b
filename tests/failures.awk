# Of ctest's LastTest.log: what each test that failed said at its end, and its errors, so that the end of a run tells why.
/^[0-9]+\/[0-9]+ Testing: / { name = $3; lines = 0; inside = 0; next }
/^Output:$/ { inside = 1; next }
/^<end of output>$/ { inside = 0; next }
inside { output[lines++] = $0 }
/^Test (Failed|Timeout)|^Test .*[Tt]imed out|^Test not run|^Test.*Exception/ && !inside {
  print "run: failed: " name
  behind = 0
  for (i = 0; i < lines; ++i) {
    if (output[i] ~ /: Failure$/) behind = 6  # what was expected, and what there was
    if (i >= lines - 12 || behind-- > 0 || output[i] ~ /ERROR|SUMMARY|FAILED|[Ff]ailure|failed:/) print "    " substr(output[i], 1, 240)
  }
}
