//! What people are given to reach a hosted cluster, looked at by the programs that they have: openssl and
//! kubectl.

use std::fs;

use jiff::Timestamp;
use portico_lab::Kubectl;
use portico_pki::{Credential, ends};
use serde_json::{Value, json};

use super::cluster::Hosted;
use crate::support::given;

impl Hosted<'_> {
    /// The API server's certificate, through the gateway: by the CA of the kubeconfig and for its name, and
    /// neither by the CA of `other` nor for another name.
    pub(super) fn is_known_by_its_certificate(&self, other: &Hosted<'_>) {
        let server = given(&self.kubectl).server;
        let address = server.strip_prefix("https://").unwrap();
        let (name, _) = address.rsplit_once(':').unwrap();
        let trusting = |cluster: &Hosted<'_>| {
            let file = self.client.dir().join(format!("{}-trusted.crt", cluster.name));
            fs::write(&file, given(&cluster.kubectl).authority).unwrap();
            file.display().to_string()
        };
        let look = |ca: &str, verified: &str| {
            let ask = ["openssl", "s_client", "-connect", address, "-servername", name, "-CAfile", ca];
            self.client.run(&[&ask[..], &["-verify_return_error", "-verify_hostname", verified]].concat())
        };
        let ca = trusting(self);
        let said = look(&ca, name).unwrap();
        assert!(said.contains("Verify return code: 0 (ok)"), "{said}");
        for (ca, name, why) in
            [(&trusting(other), name, "verify error"), (&ca, "other.example.com", "ostname mismatch")]
        {
            let refused = format!("{:#}", look(ca, name).unwrap_err());
            assert!(refused.contains(why), "{refused}");
        }
    }

    /// The administrator, and a person with a certificate that `portico kubeconfig` has the cluster sign.
    pub(super) fn knows_its_people(&self) {
        let who = |kubectl: &Kubectl| -> Value {
            let said = kubectl.run(&["auth", "whoami", "--output=json"]).unwrap();
            serde_json::from_str::<Value>(&said).unwrap()["status"]["userInfo"].clone()
        };
        let admin = who(&self.kubectl);
        assert!(admin["groups"].as_array().unwrap().contains(&json!("system:masters")), "{admin}");

        let file = self.client.dir().join(format!("{}-alice.kubeconfig", self.name));
        let seed = self.seed.kubectl().kubeconfig().display().to_string();
        let output = file.display().to_string();
        let ask = ["kubeconfig", self.name, "--kubeconfig", &seed, "--output", &output];
        let person = ["--as", "alice@example.com", "--group", "dev", "--for", "1h"];
        self.portico(&[&ask[..], &person].concat()).unwrap();
        let alice = Kubectl::new(self.client, &file).unwrap();
        let user = who(&alice);
        assert_eq!(user["username"], "alice@example.com");
        assert_eq!(user["groups"], json!(["dev", "system:authenticated"]));
        let refused = format!("{:#}", alice.run(&["get", "secrets"]).unwrap_err());
        assert!(refused.contains("(Forbidden)"), "{refused}");
        let Credential::Certificate(pair) = given(&alice).credential else {
            panic!("no certificate in {output}")
        };
        let left = ends(&pair.certificate).unwrap().duration_since(Timestamp::now());
        assert!((1..=60).contains(&left.as_mins()), "{left}");
    }
}
