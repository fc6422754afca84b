// librejoin.so is made of the modules' objects; this names its version.
extern "C" const char* rejoin_version() { return "0.1.0"; }
