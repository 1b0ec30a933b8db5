//! One pass over the gateway: what should exist is applied, in the order in which it depends on each other.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Service;
use kube::Api;
use portico_api::annotations::{PROVIDED, TUNNEL_CERTIFICATE};
use portico_api::configuration::KubermaticConfiguration;
use portico_api::names::GATEWAY_PODS;
use portico_api::seed::Seed;
use portico_expose::components::{Components, Part, components, tunnel_hosts, usable};
use portico_expose::exposure::MANAGED_BY;
use portico_expose::inputs::Ingress;
use portico_expose::resolve::no_such_seed;
use portico_kube::apply::writing;
use serde_json::Value;
use tokio::time::Instant;

use super::context::Context;
use super::tunnel::{is_in_the_way, names};
use crate::condition::State;
use crate::managed::{Managed, Presence};
use crate::write::{WriteError, must_lead, request};

/// How long a load balancer may take until it has an address. Clouds need one to three minutes.
const ADDRESS_GRACE: SignedDuration = SignedDuration::from_mins(5);

impl Context {
    /// Makes the gateway as `seed` asks for, if it is the Seed of the gateway. Returns the status of `seed`
    /// then.
    pub(super) async fn pass(&self, seed: &Seed) -> Result<State, WriteError> {
        if let Some(state) = self.of_another_seed(seed) {
            return Ok(state);
        }
        if seed.spec.nodeport_proxy.disable {
            return self.remove_all().await;
        }
        let configuration = match self.installation.configurations.one() {
            Ok(Some(configuration)) => configuration,
            Ok(None) => {
                // The names of the certificate follow from it.
                let message = "there is no KubermaticConfiguration; write one, with spec.ingress.domain";
                return Ok(State::bad("NoConfiguration", message.to_owned()));
            }
            Err(several) => return Ok(State::bad("InvalidConfiguration", several.to_string())),
        };
        let load_balancer = match usable(seed) {
            Ok(load_balancer) => load_balancer,
            Err(refused) => {
                let message = format!("{refused}; the gateway stays as it is");
                return Ok(State::bad("InvalidConfiguration", message));
            }
        };
        if let Some(state) = self.in_the_way(seed).or_else(|| self.yielded()) {
            return Ok(state);
        }
        let hosts = self.hosts(&configuration);
        let tunnel = self.tunnel(seed, names(hosts), (self.settings.clock)()).await?;
        self.status.seeds(|seeds| seeds.certificate_ends = tunnel.ends.map(|end| end.as_second()));
        let settings = &self.settings.gateway;
        let wanted = components(seed, &load_balancer, &configuration, settings, tunnel.serves);
        self.write_parts(seed, &wanted).await?;
        let state = tunnel.problem.unwrap_or_else(|| self.availability());
        Ok(if state.ready { self.reachability(state) } else { state })
    }

    /// Status of a Seed that has no gateway of its own.
    fn of_another_seed(&self, seed: &Seed) -> Option<State> {
        let seeds = self.installation.seeds.seeds();
        match &self.settings.seed {
            Some(named) if **named == *seed.metadata.name => None,
            Some(named) if seeds.iter().all(|seed| *seed.metadata.name != **named) => {
                let message = format!("{}; the gateway stays as it is", no_such_seed(named, &seeds));
                Some(State::bad("NoSuchSeed", message))
            }
            Some(named) => {
                let message = format!("the gateway is that of Seed {named}, and serves these clusters too");
                Some(State::good("GatewayShared", message))
            }
            None if seeds.len() < 2 => None,
            None => {
                let names: Vec<_> = seeds.iter().map(|seed| seed.metadata.key().to_string()).collect();
                let message = format!(
                    "there are several Seeds ({}), and one gateway; name its Seed with --seed. Until then it \
                     stays as it is",
                    names.join(", ")
                );
                Some(State::bad("SeveralSeeds", message))
            }
        }
    }

    /// Names by which agents reach the tunnel listener, with those of every Seed: they share it.
    fn hosts(&self, configuration: &KubermaticConfiguration) -> impl Iterator<Item = String> + use<> {
        let front = self.part(Part::Service).and_then(Managed::value);
        let ingress = front.map(|front| Ingress::of_service(&front)).unwrap_or_default();
        let seeds = self.installation.seeds.seeds();
        tunnel_hosts(&seeds, configuration, &self.settings.gateway.front, &ingress).into_iter()
    }

    /// The objects that somebody else has made under the names of those that are wanted.
    fn in_the_way(&self, seed: &Seed) -> Option<State> {
        let foreign = |held: &&dyn Managed| held.presence() == Presence::Foreign;
        let wanted = self.parts.iter().filter(|(part, _)| part.is_wanted(&self.settings.gateway));
        let parts = wanted.map(|(_, held)| &**held).filter(foreign);
        let trusted = Some(&self.trusted as &dyn Managed).filter(foreign);
        let secrets = [&self.certificate as &dyn Managed, &self.authority];
        let secrets = secrets.into_iter().filter(|held| is_in_the_way(*held, seed));
        let found: Vec<String> = parts
            .chain(trusted)
            .chain(secrets)
            .map(|held| format!("{} {}", held.kind(), held.key()))
            .collect();
        let (first, namespace) = (found.first()?, &self.settings.gateway.front.namespace);
        let kind_and_name = first.replace(&format!("{namespace}/"), "").to_lowercase();
        let mut message = format!(
            "not made by this operator, so nothing is written: {}. To hand one over: kubectl label -n \
             {namespace} {kind_and_name} {}={} --overwrite",
            found.join(", "),
            MANAGED_BY.0,
            MANAGED_BY.1
        );
        if self.certificate.presence() == Presence::Foreign {
            let seed = &seed.metadata.name;
            message += &format!(
                ". To use the certificate as it is: kubectl annotate -n {namespace} seed {seed} \
                 {TUNNEL_CERTIFICATE}={PROVIDED}"
            );
        }
        Some(State::bad("NameTaken", message))
    }

    /// An object that another writer changes back.
    fn yielded(&self) -> Option<State> {
        let now = Instant::now();
        let found = self.held().find_map(|held| Some((held, held.yielded_to(now)?)));
        found.map(|(held, writer)| {
            let message = format!(
                "{} {} is changed back by {writer} each time it is written; stop that writer, this one waits",
                held.kind(),
                held.key()
            );
            State::bad("ForeignWriter", message)
        })
    }

    async fn write_parts(&self, seed: &Seed, wanted: &Components) -> Result<(), WriteError> {
        for (part, held) in &self.parts {
            match wanted.objects.iter().find(|(wanted, _)| wanted == part) {
                None => self.remove(&**held).await?,
                Some((_, object)) => {
                    if *part == Part::Service && held.presence() == Presence::Absent {
                        self.create_front(&wanted.front).await?;
                    }
                    self.write(seed, &**held, &object.fields).await?;
                }
            }
        }
        Ok(())
    }

    /// Creates the front Service, with ports: those are then the front controller's to keep, which an apply
    /// of them would dispute.
    async fn create_front(&self, front: &Value) -> Result<(), WriteError> {
        must_lead(&self.leads)?;
        let impossible = |error: serde_json::Error| WriteError::Impossible(error.to_string());
        let service: Service = serde_json::from_value(front.clone()).map_err(impossible)?;
        let namespace = &self.settings.gateway.front.namespace;
        let api = Api::<Service>::namespaced(self.client.clone(), namespace);
        let params = writing();
        request("creating the front Service", api.create(&params, &service)).await?;
        self.count(true, Part::Service.kind());
        Ok(())
    }

    /// Deletes the objects that were made, but for the authority. Agents trust it, also if the gateway comes
    /// back.
    async fn remove_all(&self) -> Result<State, WriteError> {
        let made = self.parts.iter().rev().map(|(_, held)| &**held);
        for held in made.chain([&self.certificate as &dyn Managed]) {
            self.remove(held).await?;
        }
        self.status.seeds(|seeds| seeds.certificate_ends = None);
        let message = "spec.nodeportProxy.disable is set: there is no gateway";
        Ok(State::good("Disabled", message.to_owned()))
    }

    /// Whether pods serve.
    fn availability(&self) -> State {
        let deployment = self.part(Part::Deployment).and_then(Managed::value).unwrap_or_default();
        let number = |path: &str| deployment.pointer(path).and_then(Value::as_u64).unwrap_or_default();
        let (available, wanted) = (number("/status/availableReplicas"), number("/spec/replicas"));
        let (updated, key) = (number("/status/updatedReplicas"), &self.settings.gateway.front.namespace);
        if available == 0 {
            let message =
                format!("none of {wanted} pods serves: kubectl describe pods -n {key} -l {GATEWAY_PODS}");
            return State::bad("GatewayUnavailable", message);
        }
        if available < wanted || updated < wanted {
            let message = format!("{available} of {wanted} pods serve, {updated} are as the Seed asks");
            return State::good("GatewayProgressing", message);
        }
        State::good("GatewayReady", format!("{wanted} pods serve"))
    }

    /// Whether the load balancer has an address, where pods serve as `state` says.
    fn reachability(&self, state: State) -> State {
        let Some(wait) = self.address_wait() else { return state };
        let key = Part::Service.key(&self.settings.gateway.front);
        if wait.is_positive() {
            let message = format!("{}; Service {key} has no address yet", state.message);
            return State { message, ..state };
        }
        let message = format!(
            "Service {key} has no address {} minutes after it was made: nothing on this seed gives addresses \
             to Services of type LoadBalancer, or its quota is used up: kubectl describe service -n {} {}",
            ADDRESS_GRACE.as_mins(),
            key.namespace,
            key.name
        );
        State::bad("LoadBalancerPending", message)
    }

    /// How much longer the load balancer may take for its address; `None` if it has one, or is none.
    pub(super) fn address_wait(&self) -> Option<SignedDuration> {
        let service = self.part(Part::Service).and_then(Managed::value)?;
        let is_balancer = service.pointer("/spec/type").is_some_and(|kind| kind == "LoadBalancer");
        if !is_balancer || !Ingress::of_service(&service).is_empty() {
            return None;
        }
        // The creation time counts, and not when this process first saw it: a restart neither heals nor hides
        // it.
        let made: Timestamp = service.pointer("/metadata/creationTimestamp")?.as_str()?.parse().ok()?;
        Some((made + ADDRESS_GRACE).duration_since((self.settings.clock)()))
    }
}
