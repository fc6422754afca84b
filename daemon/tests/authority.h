// Certificates for tests: an authority, and what it signs.
#pragma once

#include <gtest/gtest.h>
#include <openssl/ec.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <memory>
#include <string>

#include "daemon/certificates.h"
#include "tests/process.h"

namespace rejoin::test {

class Authority {
 public:
  struct Signed {
    std::string names = "IP:127.0.0.1,DNS:localhost";  // empty: none
    std::string usage = "serverAuth,clientAuth";
    long from = -3600, until = 3600;  // seconds from now
  };

  explicit Authority(const std::string& name = "authority") : name_(name), certificate_(make(name, *key_, Signed{})) {
    write(name + ".pem", *certificate_);
  }
  std::string file(const std::string& name) const { return scratch_.path + "/" + name; }
  std::string ca() const { return file(name_ + ".pem"); }
  // A file with its certificate and another's, as whoever takes those of both has it.
  std::string ca_and(const Authority& other) const {
    return scratch_.write("both.pem", test::read_file(ca()) + test::read_file(other.ca()));
  }
  // Its certificate and key, NAME.pem and NAME.key; those that are there are replaced.
  daemon::CertificateFiles sign(const std::string& name, const Signed& as) const {
    const Key key = new_key();
    write(name + ".pem", *make(name, *key, as));
    std::unique_ptr<BIO, decltype(&::BIO_free)> bio(::BIO_new(::BIO_s_mem()), &::BIO_free);
    EXPECT_EQ(::PEM_write_bio_PrivateKey(bio.get(), key.get(), nullptr, nullptr, 0, nullptr, nullptr), 1);
    return {.ca = ca(), .cert = file(name + ".pem"), .key = scratch_.write(name + ".key", written(*bio))};
  }

  daemon::CertificateFiles sign(const std::string& name) const { return sign(name, Signed()); }

 private:
  using Key = std::unique_ptr<EVP_PKEY, decltype(&::EVP_PKEY_free)>;
  using Certificate = std::unique_ptr<X509, decltype(&::X509_free)>;

  static Key new_key() { return {EVP_EC_gen("P-256"), &::EVP_PKEY_free}; }
  static std::string written(BIO& bio) {
    char* text = nullptr;
    const long length = BIO_get_mem_data(&bio, &text);
    return {text, static_cast<std::size_t>(length)};
  }
  static void extend(X509& certificate, int what, const std::string& value) {
    X509_EXTENSION* extension = ::X509V3_EXT_conf_nid(nullptr, nullptr, what, value.c_str());
    EXPECT_NE(extension, nullptr) << value;
    EXPECT_EQ(::X509_add_ext(&certificate, extension, -1), 1);
    ::X509_EXTENSION_free(extension);
  }
  Certificate make(const std::string& name, EVP_PKEY& key, const Signed& as) const {
    const bool own = &key == key_.get();
    Certificate made(::X509_new(), &::X509_free);
    X509& certificate = *made;
    ::X509_set_version(&certificate, X509_VERSION_3);
    ::ASN1_INTEGER_set(::X509_get_serialNumber(&certificate), own ? 1 : ++serial_);
    ::X509_gmtime_adj(X509_getm_notBefore(&certificate), as.from);
    ::X509_gmtime_adj(X509_getm_notAfter(&certificate), as.until);
    X509_NAME* subject = ::X509_get_subject_name(&certificate);
    ::X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_UTF8, reinterpret_cast<const unsigned char*>(name.c_str()), -1,
                                 -1, 0);
    ::X509_set_issuer_name(&certificate, own ? subject : ::X509_get_subject_name(certificate_.get()));
    ::X509_set_pubkey(&certificate, &key);
    extend(certificate, NID_basic_constraints, own ? "critical,CA:TRUE" : "critical,CA:FALSE");
    if (!own && !as.names.empty()) extend(certificate, NID_subject_alt_name, as.names);
    if (!own && !as.usage.empty()) extend(certificate, NID_ext_key_usage, as.usage);
    EXPECT_GT(::X509_sign(&certificate, key_.get(), ::EVP_sha256()), 0);
    return made;
  }
  void write(const std::string& name, X509& certificate) const {
    std::unique_ptr<BIO, decltype(&::BIO_free)> bio(::BIO_new(::BIO_s_mem()), &::BIO_free);
    EXPECT_EQ(::PEM_write_bio_X509(bio.get(), &certificate), 1);
    scratch_.write(name, written(*bio), 0644);
  }

  const Scratch scratch_;
  const std::string name_;
  const Key key_ = new_key();
  mutable long serial_ = 1;
  const Certificate certificate_;
};

}  // namespace rejoin::test
