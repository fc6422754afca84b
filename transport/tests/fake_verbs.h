// What a test does to the devices of fake_verbs.cc.
#pragma once

void fake_verbs_port(const char* device, bool up);
